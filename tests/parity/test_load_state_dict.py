"""`model.load_state_dict` of a wrapped model: masters are replaced, moments stay."""

from __future__ import annotations

import gc

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


@pytest.mark.parametrize(
    "settings",
    [{}, {"placement": {"weights": "device", "state": "disk"}, "device_memory": "64MiB"}],
    ids=["moves", "kept"],
)
def test_units_that_a_forward_has_left_on_the_device_are_loaded_too(settings, tmp_path):
    case = Case()
    oracle = case.oracle()
    with case.engine(tmp_path, **settings) as engine:
        for step in range(3):
            engine_step(engine, case, step, Trained())
            oracle_step(oracle, case, step, Trained())
            if step == 0:
                best = engine.module.state_dict()
            if step == 1:
                engine(*case.batches(step)[0])  # its backward never comes
                assert engine._parts.residency.present
                engine.module.load_state_dict(best)
                load(oracle, best)
        assert_same(collect_engine(engine, Trained()), collect_oracle(oracle, Trained()))


def test_a_load_that_ends_in_an_exception_is_over(tmp_path):
    def fail(*args) -> None:
        raise KeyError("a hook of the user's")

    case = Case()
    with case.engine(tmp_path) as engine:
        handle = engine.module.blocks[1].register_load_state_dict_pre_hook(fail)
        state = engine.module.state_dict()
        with pytest.raises(KeyError, match="a hook of the user's"):
            engine.module.load_state_dict(state)
        handle.remove()
        gc.collect()  # the exception holds the frames of the load
        with pytest.raises(StateError, match="gathered"), torch.no_grad():
            engine.module.head.weight.copy_(state["head.weight"])
        engine_step(engine, case, 0, Trained())
