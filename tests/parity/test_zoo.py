"""Every kind of model, wherever its weights and states live: the bits of its run in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import models
import pytest
import zoo
from case import (
    BF16,
    FP32,
    Case,
    Trained,
    assert_offloaded,
    assert_same,
    engine_step,
    oracle_step,
    same_bits,
    train_in_memory,
    train_offloaded,
)
from test_corners import CORNERS, smallest

from offload.partition.unit import round_up

BASE_WEIGHTS = ("embed", "norm", "head", "base", "out", "down")  # frozen under adapters
LOW_RANK = Case(kind=zoo.LowRank, frozen=BASE_WEIGHTS)
KINDS = [
    zoo.Recurrent, zoo.Collections, zoo.EncoderDecoder, zoo.Mixture, zoo.Vision, zoo.SharedBlock,
    zoo.Parametrized, zoo.OldWeightNorm, zoo.Bags, zoo.Structured, zoo.Hooked, zoo.InputGradient,
    zoo.TwoForwards, zoo.CustomFunction,
]  # fmt: skip
ZOO = {kind.__name__: Case(kind=kind) for kind in KINDS} | {
    "LowRank": LOW_RANK,
    "LowRank-reentrant": dataclasses.replace(LOW_RANK, options=(("checkpointing", "reentrant"),)),
    "LowRank-nonreentrant": dataclasses.replace(
        LOW_RANK, options=(("checkpointing", "nonreentrant"),)
    ),
    "LowRankInside": dataclasses.replace(LOW_RANK, kind=zoo.LowRankInside),
    "LowRankReentrantInside": dataclasses.replace(LOW_RANK, kind=zoo.LowRankReentrantInside),
    "Mixture-nonreentrant": Case(kind=zoo.Mixture, options=(("checkpointing", "nonreentrant"),)),
    "Mixture-reentrant": Case(kind=zoo.Mixture, options=(("checkpointing", "reentrant"),)),
}
PLACES: dict[str, dict[str, Any]] = {
    "disk": {"placement": "disk"},
    "host": {"placement": "host"},
    "mixed": {"placement": {"weights": "host", "state": "disk"}, "param_persistence_threshold": 60},
    "device": {"placement": "device", "host_memory": "64MiB", "device_memory": "64MiB"},
    "auto": {"placement": "auto"},  # with a budget for a half
}


def settings_at(place: str, case: Case, folder: Path) -> dict[str, Any]:
    if place == "disk":
        return {**PLACES[place], "device_memory": smallest("device_memory", case, folder)}
    if place != "auto":
        return PLACES[place]
    (folder / "whole").mkdir()
    with case.engine(folder / "whole", placement="auto") as engine:
        divided = engine._parts.ground.blueprint.placement
    return {"placement": "auto", "host_memory": divided.total_bytes - divided.resident_bytes // 2}


@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ZOO)
def test_a_model_equals_its_run_in_memory_on_every_placement(name, place, dtype, tmp_path):
    case = dataclasses.replace(ZOO[name], dtype=dtype, clipping=0.5)
    with case.engine(tmp_path, **settings_at(place, case, tmp_path)) as engine:
        trained = train_offloaded(engine, case)
        if place == "disk":
            assert_offloaded(engine)
    assert_same(trained, train_in_memory(case))
    assert_everything_learned(case, trained)


def assert_everything_learned(case: Case, trained: Trained) -> None:
    """A comparison of weights that never moved would pass for nothing."""
    assert len(set(trained.losses)) == len(trained.losses) == case.num_steps >= 3
    still = [
        name for name, moment in trained.exp_avgs.items() if moment.numel() and not moment.any()
    ]
    assert trained.exp_avgs
    assert not still


@pytest.mark.parametrize("place", ["host", "mixed"])
@pytest.mark.parametrize("corner", CORNERS)
def test_an_awkward_model_equals_its_run_in_memory_away_from_the_disk(corner, place, tmp_path):
    case = Case(dtype=FP32, clipping=0.5, **CORNERS[corner])
    with case.engine(tmp_path, **PLACES[place]) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("place", ["disk", "host"])
def test_buffers_keep_their_types_and_change_as_in_memory(place, tmp_path):
    case = Case(kind=zoo.Vision, clipping=0.5)
    oracle = case.oracle()
    before = {name: buffer.clone() for name, buffer in oracle.model.named_buffers()}
    with case.engine(tmp_path, **PLACES[place]) as engine:
        for step in range(case.num_steps):
            engine_step(engine, case, step, Trained())
            oracle_step(oracle, case, step, Trained())
            expected = dict(oracle.model.named_buffers())
            for name, buffer in engine.module.named_buffers():
                assert same_bits(buffer, expected[name]), name
        assert engine.module.calls.item() == case.num_steps
        changed = {n for n, b in engine.module.named_buffers() if not same_bits(b, before[n])}
    assert {"calls", "norm.running_mean", "norm.num_batches_tracked"} <= changed
    assert changed < before.keys()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_frozen_weights_are_never_written_and_have_no_state(dtype, tmp_path):
    """Adapters on a frozen model: a step writes the units that hold adapters, and of those the
    adapters' state alone, each role padded to 4096 elements."""
    case = dataclasses.replace(LOW_RANK, dtype=dtype, clipping=0.5, options=(("width", 48),))
    num_steps = case.num_steps
    with case.engine(tmp_path) as engine:
        units = engine._parts.ground.blueprint.found.units
        adapted = [unit for unit in units if unit.trainable_elems]
        assert 0 < len(adapted) < len(units)
        before = engine.metrics.write_bytes.copy()
        trained = train_offloaded(engine, case)
        engine._parts.ground.ledger.finish()
        written = engine.metrics.write_bytes - before
    assert_same(trained, train_in_memory(case))
    assert trained.exp_avgs.keys().isdisjoint(frozen_names(case))
    for role, elem_bytes in (("param", 2), ("master_lo", 2), ("exp_avg", 4), ("exp_avg_sq", 4)):
        most = sum(elem_bytes * round_up(unit.trainable_elems, 4096) for unit in adapted)
        found = sum(size for name, size in written.items() if name.endswith(f".{role}"))
        assert 0 < found <= num_steps * most, role
        assert most < sum(elem_bytes * unit.num_elems for unit in units) / 3


def frozen_names(case: Case) -> set[str]:
    return {name for name, param in case.model().named_parameters() if not param.requires_grad}


def test_a_narrow_decoder_is_in_the_zoo_too(tmp_path):
    """What the zoo's models are made of is itself equal, so that a difference is theirs."""
    case = Case(kind=zoo.Small, options=(("tied", True),))
    assert issubclass(zoo.Small, models.Decoder)
    with case.engine(tmp_path) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))
