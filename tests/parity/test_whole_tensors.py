"""Optimizers that need whole tensors: the same bits as in memory, states packed."""

import pytest
import torch
import torch_training as twin
from torch import optim

from offload.errors import BudgetError, ConfigError

WHOLE = {
    "Adafactor": (optim.Adafactor, {"lr": 1e-2}, {"weight_decay": 0.1}, {}),
    "Muon": (optim.Muon, {"lr": 1e-2}, {"momentum": 0.8}, {"matrices": True}),
}


@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize("name", WHOLE)
def test_a_class_that_needs_whole_tensors_gives_the_bits_of_memory(name, threshold, tmp_path):
    cls, base, spare, options = WHOLE[name]
    memory = twin.InMemory(twin.build(**options), cls, base, spare).train(0, twin.NUM_STEPS)
    settings = {"options": options, "param_persistence_threshold": threshold}
    with twin.engine(tmp_path, cls, base, spare, **settings) as engine:
        twin.assert_same_training(engine, memory)
        twin.assert_moved(twin.masters(engine), **options)
        param = engine.module.spare.weight
        for state, theirs in memory.optimizer.state[memory.masters["spare.weight"]].items():
            if theirs.ndim:
                assert torch.equal(engine.full_optimizer_state(param, state), theirs)


ADAFACTOR = WHOLE["Adafactor"][:3]


def test_only_rows_and_columns_are_moved_beside_the_weights(tmp_path):
    with twin.engine(tmp_path, *ADAFACTOR) as engine:
        twin.train(engine, 0, 2)
        before = dict(engine.metrics.read_bytes), dict(engine.metrics.write_bytes)
        twin.train(engine, 2, 3)
        num_elems = sum(p.numel() for p in engine.module.blocks.parameters())
        for counted, old in zip(
            (engine.metrics.read_bytes, engine.metrics.write_bytes), before, strict=True
        ):
            moved = {key: counted[key] - old.get(key, 0) for key in counted}
            assert 0 < moved["update.exp_avg"] <= 4 * 4096 * 3
            assert moved["update.exp_avg"] < 0.25 * num_elems * 4
            assert not moved.get("update.exp_avg_sq")


def test_a_unit_that_no_budget_holds_is_refused_with_the_sum(tmp_path):
    with (
        pytest.raises(BudgetError, match=r"host_memory is too small: expected at least [\d,]+"),
        twin.engine(tmp_path, *ADAFACTOR, host_memory="300KiB"),
    ):
        pass


@pytest.mark.parametrize("threshold", [0, 1000])
def test_resume_and_checkpoints_go_on_bit_for_bit(threshold, tmp_path):
    """The checkpoint is loaded into other units: small tensors here, all in the store there."""
    with twin.engine(tmp_path / "straight", *ADAFACTOR) as engine:
        twin.train(engine, 0, twin.NUM_STEPS)
        expected = twin.masters(engine)
    with twin.engine(tmp_path / "cut", *ADAFACTOR) as engine:
        twin.train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "saved").wait()
    with twin.engine(tmp_path / "cut", *ADAFACTOR, resume=True) as engine:
        twin.train(engine, 3, twin.NUM_STEPS)
        assert all(torch.equal(x, expected[name]) for name, x in twin.masters(engine).items())
    settings = {"param_persistence_threshold": threshold}
    with twin.engine(tmp_path / "other", *ADAFACTOR, **settings) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        twin.train(engine, 3, twin.NUM_STEPS)
        assert all(torch.equal(x, expected[name]) for name, x in twin.masters(engine).items())


def test_an_edit_keeps_the_states(tmp_path):
    memory = twin.InMemory(twin.build(), *ADAFACTOR).train(0, 3)
    with twin.engine(tmp_path, *ADAFACTOR) as engine:
        twin.train(engine, 0, 3)
        weight = engine.module.blocks[1].up.weight
        with engine.gathered(weight), torch.no_grad():
            weight[0] += 1.0
        for state in ("row_var", "col_var"):
            theirs = memory.optimizer.state[memory.masters["blocks.1.up.weight"]][state]
            assert torch.equal(engine.full_optimizer_state(weight, state), theirs)


def test_a_shape_that_the_class_does_not_take_is_refused_by_name(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"blocks\.0\.up\.bias: expected a tensor that Muon takes"),
        twin.engine(tmp_path, optim.Muon, {"lr": 1e-2}, {}),
    ):
        pass


def test_fp16_weights_beside_whole_masters_give_the_bits_of_memory(tmp_path):
    memory = twin.InMemory(twin.build(), *ADAFACTOR, scale=512.0).train(0, twin.NUM_STEPS)
    with twin.engine(tmp_path, *ADAFACTOR, dtype="fp16", initial_scale_power=9) as engine:
        twin.assert_same_training(engine, memory)
        twin.assert_moved(twin.masters(engine))
