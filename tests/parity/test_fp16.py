"""Weights that move as fp16 with a loss scale: an engine equals memory bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from case import (
    FP16,
    FP32,
    Case,
    Trained,
    assert_learned,
    assert_offloaded,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    oracle_step,
    same_bits,
    train_in_memory,
    train_offloaded,
)

from offload import OffloadEngine
from offload.errors import ConfigError, StateError, StoreError
from offload.store.inspect import verify

STEADY = Case(
    dtype=FP16, num_steps=5, scaling=(("initial_scale_power", 10), ("hysteresis", 1))
)  # no gradient overflows
# At first each gradient overflows; later the scale grows every second step, and overflows again.
SEARCHING = dataclasses.replace(
    STEADY, num_steps=12,
    scaling=(("initial_scale_power", 21), ("hysteresis", 1), ("loss_scale_window", 2)),
)  # fmt: skip
LAST = "blocks.2.down.weight"


@pytest.fixture(params=["hold", "speculate"])
def overlap(request: pytest.FixtureRequest) -> str:
    return request.param


def clipped(case: Case, clipping: float) -> Case:
    return dataclasses.replace(case, clipping=clipping)


def note(trained: Trained, engine: OffloadEngine, *losses: torch.Tensor) -> None:
    """A step that was taken by other calls than `engine_step`."""
    trained.losses.extend(loss.item() for loss in losses)
    trained.norms.append(engine.grad_norm if math.isfinite(engine.grad_norm) else None)
    trained.scales.append(engine.scale.value)


@pytest.mark.parametrize("clipping", [0.0, 1.65, 1e-3], ids=["off", "sometimes", "always"])
@pytest.mark.parametrize("case", [STEADY, SEARCHING], ids=["steady", "searching"])
def test_training_equals_memory(case: Case, clipping: float, overlap: str, tmp_path: Path) -> None:
    case = clipped(case, clipping)
    with case.engine(tmp_path, overlap=overlap) as engine:
        trained = train_offloaded(engine, case)
        assert_offloaded(engine)
        assert engine.skipped_steps == trained.norms.count(None)
    in_memory = train_in_memory(case)
    assert_learned(case, trained)
    assert_same(trained, in_memory)
    if case.num_steps == SEARCHING.num_steps:
        skipped = [norm is None for norm in in_memory.norms]
        assert skipped[0]
        assert not all(skipped)
        assert True in skipped[skipped.index(False) :]  # after it had grown
        assert in_memory.scales != sorted(in_memory.scales, reverse=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"host_memory": "4MiB"},  # gradients are spilled
        {"placement": "host", "host_memory": "64MiB"},
        {"placement": {"weights": "host", "state": "disk"}, "host_memory": "64MiB"},
        {"durability": "none"},
        {"param_persistence_threshold": 10**9, "device_memory": "64MiB"},
        {"param_persistence_threshold": 145},
        {"chunk_elems": 1 << 20, "host_memory": "128MiB"},
    ],
    ids=lambda changed: "-".join(map(str, changed.values())),
)
def test_every_placement_has_the_same_bits(changed: dict[str, Any], tmp_path: Path) -> None:
    case = clipped(SEARCHING, 0.5)
    with case.engine(tmp_path, **changed) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_reduced_state_beside_whole_masters_equals_memory(state_dtype: str, tmp_path: Path) -> None:
    case = dataclasses.replace(
        clipped(STEADY, 0.5), state_dtype=state_dtype,
        options=(("width", 352), ("num_blocks", 2)),
        batch_options=(("size", 1), ("seq", 5)),
    )  # fmt: skip
    settings = {"chunk_elems": 262144, "host_memory": "64MiB", "device_memory": "48MiB"}
    with case.engine(tmp_path, **settings) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


def test_micro_steps_are_summed_in_fp32(overlap: str, tmp_path: Path) -> None:
    case = dataclasses.replace(clipped(SEARCHING, 0.5), accumulation=2)
    with case.engine(tmp_path, overlap=overlap) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("order", ["horizontal", "layer"])
def test_a_batch_of_micro_steps_is_scaled_in_either_order(order: str, tmp_path: Path) -> None:
    case = dataclasses.replace(clipped(SEARCHING, 0.5), accumulation=2)
    trained = Trained()
    with case.engine(tmp_path) as engine:
        for step in range(case.num_steps):
            losses = engine.train_batch(case.batches(step), order=order)
            note(trained, engine, *losses)
        collect_engine(engine, trained)
    assert_same(trained, train_in_memory(case))


def test_what_computes_may_be_fp16_too(tmp_path: Path) -> None:
    case = dataclasses.replace(STEADY, compute_dtype=FP16)
    with case.engine(tmp_path) as engine:
        assert next(iter(engine.module.parameters())).dtype is FP16
        trained = train_offloaded(engine, case)
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


def test_parameters_without_gradient_and_frozen_ones_keep_their_weights(tmp_path: Path) -> None:
    """An update does not read the weights: those that it leaves alone come from their masters."""
    import models

    case = dataclasses.replace(clipped(STEADY, 0.5), kind=models.UnusedParts, frozen=("blocks.1.",))
    with case.engine(tmp_path) as engine:
        trained = train_offloaded(engine, case)
        seen = engine.module.state_dict()
    oracle, in_memory = case.oracle(), Trained()
    for step in range(case.num_steps):
        oracle_step(oracle, case, step, in_memory)
    assert_same(trained, collect_oracle(oracle, in_memory))
    for name, value in oracle.model.state_dict().items():
        assert seen[name].dtype is FP16
        assert same_bits(seen[name].float(), value), name


@pytest.mark.parametrize("frozen", ["up.weight", "qkv.bias", "norm"])
def test_frozen_weights_beside_trained_ones_are_never_written(frozen: str, tmp_path: Path) -> None:
    """Trained weights are written without being read, in whole blocks: none may hold a frozen
    one."""
    case = dataclasses.replace(STEADY, frozen=(frozen,))
    with case.engine(tmp_path) as engine:
        trained = train_offloaded(engine, case)
        seen = engine.module.state_dict()
    assert_same(trained, train_in_memory(case))
    before = case.oracle().model.state_dict()
    kept = [name for name in before if frozen in name]
    assert kept
    assert all(same_bits(seen[name].float(), before[name]) for name in kept)
    (folder,) = tmp_path.iterdir()
    for unit, problems in verify([tmp_path], folder.name.removeprefix("offload-")):
        assert not problems, unit


def test_an_injected_infinity_skips_the_step_and_halves_the_scale(
    overlap: str, tmp_path: Path
) -> None:
    case = clipped(STEADY, 0.5)
    oracle, ours, theirs = case.oracle(), Trained(), Trained()
    with case.engine(tmp_path, overlap=overlap) as engine:
        for step in range(5):
            if step in (1, 3):
                before = collect_engine(engine, Trained())
                engine.backward(engine(*case.batches(70)[0]) * math.inf)
                engine.step()
                assert_same(collect_engine(engine, Trained()), before)
                oracle.scale /= 2
                assert engine.scale.value == oracle.scale
            engine_step(engine, case, step, ours)
            oracle_step(oracle, case, step, theirs)
        assert engine.skipped_steps == 2
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


def test_kept_gradients_and_norms_are_unscaled(tmp_path: Path) -> None:
    oracle = STEADY.oracle()
    (batch,) = STEADY.batches(0)
    (oracle.model(*batch) * oracle.scale).backward()
    oracle.keep_gradients()
    with STEADY.engine(tmp_path) as engine:
        engine.backward(engine(*batch))
        for name, param in engine.module.named_parameters():
            kept = engine.kept_grad(param)
            assert kept.dtype is FP32
            assert same_bits(kept.flatten(), oracle.states[name].kept / oracle.scale), name
        engine.step()
        total = sum(float((s.kept.double() ** 2).sum()) for s in oracle.states.values())
        assert engine.grad_norm == pytest.approx(total**0.5 / oracle.scale, rel=1e-12)


@pytest.mark.parametrize("threshold", [0, 10**9])
def test_a_gradient_assigned_before_backward_is_unscaled(threshold: int, tmp_path: Path) -> None:
    """Wherever its parameter is: small ones are on the device, the others away."""
    settings = {"param_persistence_threshold": threshold, "device_memory": "64MiB"}
    (batch,) = STEADY.batches(0)
    with STEADY.engine(tmp_path, **settings) as engine:
        names = dict(engine.module.named_parameters())
        for _ in range(3):
            for parameter in names.values():
                parameter.grad = torch.ones(parameter.shape)
            engine.backward(engine(*batch))
            both = {name: engine.kept_grad(name) for name in names}
            engine.optimizer.zero_grad()
            engine.backward(engine(*batch))
            for name in names:
                alone = engine.kept_grad(name)
                torch.testing.assert_close(both[name], alone + 1, rtol=1e-3, atol=1e-3)
            engine.optimizer.zero_grad()


def test_a_small_parameter_may_be_copied_between_steps(tmp_path: Path) -> None:
    settings = {"param_persistence_threshold": 10**9, "device_memory": "64MiB"}
    with STEADY.engine(tmp_path, **settings) as engine:
        engine_step(engine, STEADY, 0, Trained())
        weight = engine.module.norm.weight
        copied = copy.deepcopy(weight)
        assert type(copied) is torch.nn.Parameter
        assert same_bits(copied, weight)
        copied.sum().backward()
        assert weight.grad is None


def test_reading_gradients_under_a_scale_that_rounds_is_no_edit(tmp_path: Path) -> None:
    case = dataclasses.replace(STEADY, scaling=(), accumulation=2)  # sums are kept in fp32
    with case.engine(tmp_path, loss_scale=1000.0) as engine:
        keeper = engine._parts.keeper
        units = [unit.index for unit in engine._parts.ground.blueprint.units]
        for step in range(3):
            for batch in case.batches(step):
                engine.backward(engine(*batch))
            kept = [keeper[unit].takes for unit in units]
            found = [parameter.grad for parameter in engine.module.parameters()]
            engine._parts.lent.take_all_back()
            assert [keeper[unit].takes for unit in units] == kept
            found[0] = engine.module.embed.weight.grad
            found[0].mul_(0.5)
            engine._parts.lent.take_all_back()
            assert [keeper[unit].takes for unit in units] != kept
            engine.step()


def test_a_plain_loop_scales_its_loss(tmp_path: Path) -> None:
    case, trained = STEADY, Trained()
    with case.engine(tmp_path) as engine:
        for step in range(case.num_steps):
            loss = engine(*case.batches(step)[0])
            scaled = engine.scale(loss)
            engine.optimizer.zero_grad()
            scaled.backward()
            engine.optimizer.step()
            note(trained, engine, loss)
        collect_engine(engine, trained)
    assert_same(trained, train_in_memory(case))


def test_a_loss_that_was_not_scaled_is_refused(tmp_path: Path) -> None:
    with STEADY.engine(tmp_path) as engine:
        engine(*STEADY.batches(0)[0]).backward()
        with pytest.raises(StateError, match=r"engine\.scale\(loss\)\.backward"):
            engine.optimizer.step()
        engine.optimizer.zero_grad()
        trained = train_offloaded(engine, STEADY)
    assert_same(trained, train_in_memory(STEADY))


def test_a_fixed_scale_stays(tmp_path: Path) -> None:
    case = dataclasses.replace(STEADY, scaling=())
    with case.engine(tmp_path, loss_scale=1024.0) as engine:
        engine_step(engine, case, 0, Trained())
        engine.backward(engine(*case.batches(1)[0]) * math.inf)
        engine.step()
        assert (engine.skipped_steps, engine.scale.value) == (1, 1024.0)


@pytest.mark.parametrize("how", ["resume", "checkpoint", "regrouped"])
def test_training_goes_on_with_its_scale(how: str, tmp_path: Path) -> None:
    case, trained = clipped(SEARCHING, 0.5), Trained()
    folders = [tmp_path / "a", tmp_path / ("a" if how == "resume" else "b")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    half = next(step for step, norm in enumerate(train_in_memory(case).norms) if norm) + 1
    with case.engine(folders[0]) as engine:
        for step in range(half):
            engine_step(engine, case, step, trained)
        engine.save_checkpoint(tmp_path / "ckpt").wait()
    changed = {"param_persistence_threshold": 145} if how == "regrouped" else {}
    with case.engine(folders[1], resume=how == "resume", **changed) as engine:
        if how != "resume":
            assert engine.load_checkpoint(tmp_path / "ckpt")[0] is not None
        assert engine.scale.value == trained.scales[-1] != 2.0**21
        for step in range(half, case.num_steps):
            engine_step(engine, case, step, trained)
        collect_engine(engine, trained)
    assert_same(trained, train_in_memory(case))


@pytest.mark.parametrize("threshold", [0, 10**9])
def test_an_edit_replaces_the_masters_it_touches(threshold: int, tmp_path: Path) -> None:
    settings = {"param_persistence_threshold": threshold, "device_memory": "64MiB"}
    with STEADY.engine(tmp_path, **settings) as engine:
        engine_step(engine, STEADY, 0, Trained())
        before = collect_engine(engine, Trained())
        weight = dict(engine.module.named_parameters())[LAST]
        with engine.gathered(LAST):
            weight.data[0].fill_(0.30001)
        after = collect_engine(engine, Trained()).masters
        changed = after.pop(LAST).view(weight.shape)
        assert torch.equal(changed[0], torch.full_like(changed[0], 0.30001))
        assert same_bits(changed[1:], before.masters.pop(LAST).view(weight.shape)[1:])
        assert all(same_bits(after[name], before.masters[name]) for name in after)
        found = engine.module.state_dict()[LAST]
        assert torch.equal(found, changed.half())


def test_a_model_in_fp16_starts_from_its_weights(tmp_path: Path) -> None:
    model = STEADY.model().half()
    expected = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    with OffloadEngine(model, nvme_path=tmp_path, dtype="fp16", compute_dtype="fp32") as engine:
        for name, value in expected.items():
            assert same_bits(engine.full_fp32_param(name), value)


def test_a_store_of_another_type_is_refused(tmp_path: Path) -> None:
    with Case().engine(tmp_path, name="one"):
        pass
    with (
        pytest.raises(StoreError, match='dtype: expected "float16", got "bfloat16"'),
        STEADY.engine(tmp_path, name="one", resume=True),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": "bf16", "loss_scale": 8}, "loss_scale: expected dtype=torch.float16"),
        ({"dtype": "bf16", "compute_dtype": "fp16"}, "compute_dtype: expected torch.bfloat16 or"),
        ({"dtype": "fp16", "compute_dtype": "bf16"}, "compute_dtype: expected torch.float16 or"),
        ({"dtype": "fp16", "loss_scale": -1}, "loss_scale: expected a finite number >= 0"),
        ({"dtype": "fp16", "hysteresis": 0}, "hysteresis: expected a finite number >= 1"),
        ({"dtype": "fp8"}, "dtype: expected bfloat16, float16 or float32, got fp8"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        OffloadEngine(STEADY.model(), nvme_path=tmp_path, **settings)
