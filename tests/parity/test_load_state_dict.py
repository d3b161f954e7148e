"""`model.load_state_dict` of a wrapped model: masters are replaced, moments stay."""

from __future__ import annotations

import pytest
import torch
from case import (
    BF16,
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    oracle_step,
)

from offload import kernels
from offload.errors import StateError


@pytest.mark.parametrize("threshold", [0, 3000, 10**6])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_best_weights_are_loaded_back_and_trained_on(dtype, threshold, tmp_path):
    case = Case(dtype=dtype, options=(("tied", True),))
    oracle = case.oracle()
    with case.engine(tmp_path, param_persistence_threshold=threshold) as engine:
        for step in range(5):
            engine_step(engine, case, step, Trained())
            oracle_step(oracle, case, step, Trained())
            if step == 1:
                best = engine.module.state_dict()
            if step == 3:
                assert str(engine.module.load_state_dict(best)) == "<All keys matched successfully>"
                load(oracle, best)
                for name, value in engine.module.state_dict().items():
                    assert torch.equal(value, best[name]), name
        assert_same(collect_engine(engine, Trained()), collect_oracle(oracle, Trained()))


def load(oracle, best) -> None:
    """Elements that differ take the given value; the others keep their low halves."""
    for name, param in oracle.model.named_parameters():
        state, given = oracle.states[name], best[name].float().flatten()
        now = state.master if state.moves is FP32 else state.hi.float()
        kernels.split(torch.where(now == given, state.master, given), state.hi, state.lo)
        oracle._fill(param, state)


def test_keys_that_do_not_match_are_torchs_error(tmp_path):
    case = Case()
    with case.engine(tmp_path) as engine:
        state = engine.module.state_dict()
        state["more"] = state.pop("head.weight")
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
            engine.module.load_state_dict(state)
        assert engine.module.load_state_dict(state, strict=False).unexpected_keys == ["more"]
        engine_step(engine, case, 0, Trained())


def test_parameters_are_not_replaced(tmp_path):
    case = Case()
    with case.engine(tmp_path) as engine:
        with pytest.raises(StateError, match="assign=False"):
            engine.module.load_state_dict(engine.module.state_dict(), assign=True)
        with pytest.raises(StateError, match="gathered"), torch.no_grad():
            engine.module.head.weight.copy_(torch.zeros(engine.module.head.weight.shape))
        engine_step(engine, case, 0, Trained())
