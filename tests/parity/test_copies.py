"""Updates ahead of step() that work on copies of what stays in memory: the same bits, no reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from case import (
    BF16,
    FP16,
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    engine_step,
    train_in_memory,
    train_offloaded,
)
from test_placements import (
    NUM_STEPS,
    RATES,
    bound_for,
    delay_copies,
    held_and_serial,
    names,
    num_clipped,
    train_with_an_inf,
)

from offload import OffloadEngine
from offload.engine.planning import PlanOnly
from offload.errors import BudgetError, ConfigError
from offload.profile import FILE_NAME, Profile, encode
from offload.schedule.plan import Plan

PLACES = [{"weights": w, "state": s} for w in ("device", "host") for s in ("device", "host")]
ONE_SIDE = {"durability": "none", "overlap": "speculate"}
EVERYTHING = {**ONE_SIDE, "placement": "host", "host_memory": "64MiB"}


def slow_drive(folder: Path) -> dict[str, Any]:
    """Settings of two sides on a drive whose reading again costs more than copies."""
    profile = Profile(
        path=str(folder), date="2026-01-01", backend="threads", block_bytes=1 << 20, read_depth=8,
        write_depth=8, read_bytes_per_s=0.1e9, write_bytes_per_s=0.1e9, mixed_bytes_per_s=0.2e9,
    )  # fmt: skip
    (folder / FILE_NAME).write_text(encode(profile))
    return {"overlap": "speculate"}


def half_clipped(case: Case) -> Case:
    """With a bound that some of the steps exceed."""
    norms = sorted(norm for norm in train_in_memory(case).norms if norm is not None)
    return replace(case, clipping=1.0001 * norms[len(norms) // 2])


def plan_of(case: Case, folder: Path, host_memory: int) -> Plan:
    with pytest.raises(PlanOnly) as told:
        open_engine(case, folder, **{**EVERYTHING, "host_memory": host_memory}, plan_only=True)
    return told.value.plan


def open_engine(case: Case, folder: Path, **settings: Any) -> None:
    with case.engine(folder, **settings):
        raise AssertionError("it was made")


def undone(engine: OffloadEngine) -> set[str]:
    """The units whose updates were dropped where only a copy was changed."""
    return {*+engine._parts.speculator.history.undone}


def ran_ahead(engine: OffloadEngine) -> int:
    """Elements that are updated between backward and step()."""
    bets = [bet for bet in engine._parts.speculator._bets.values() if bet.takes is not None]
    for bet in bets:
        bet.job.wait()
    return sum(bet.job.stats.num_elems for bet in bets)


# Without clipping reading again is cheaper than copies.
@pytest.mark.parametrize(
    ("sides", "rate"), [*((1, rate) for rate in RATES), (2, "some"), (2, "all")]
)
@pytest.mark.parametrize("place", PLACES, ids=names)
def test_twenty_steps_on_copies_equal_the_held_run(sides, place, rate, tmp_path):
    bound = bound_for(RATES[rate])
    case = Case(clipping=bound, num_steps=NUM_STEPS)
    settings = ONE_SIDE if sides == 1 else slow_drive(tmp_path)
    early = []
    with case.engine(tmp_path, placement=place, **settings) as engine:
        placement, num_units = engine.plan.placement, len(engine._parts.residency.bound)
        assert len(placement.undo.copied) == num_units
        assert placement.total_bytes <= 16 << 20
        slab = engine._parts.ground.memory.slab.num_bytes
        assert slab == placement.total_bytes + placement.on_device_bytes
        assert f"of units that stay {num_units} work on copies" in str(engine.plan)
        delay_copies(engine, PLACES.index(place))
        before = engine.metrics.total_read_bytes

        def look() -> None:
            early.append(0 if len(early) % 3 else ran_ahead(engine))

        ours = train_with_an_inf(engine, case, look)
        assert engine.metrics.total_read_bytes == before
        assert len(undone(engine)) == num_units
        history = engine._parts.speculator.history
    assert_same(ours, held_and_serial(bound))
    clipped = num_clipped(ours.norms, bound)
    assert {"none": clipped == 0, "some": 0 < clipped <= 4, "all": clipped == NUM_STEPS}[rate]
    assert all(num_elems > 0 for num_elems in early[::3])
    assert (history.kept_elems > 0) is (rate != "all")
    assert (history.redone_elems > 0) is (rate != "none")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_every_type_of_state_is_copied(state_dtype, dtype, tmp_path):
    scaling = (("initial_scale_power", 4),) if dtype is FP16 else ()
    case = Case(dtype=dtype, state_dtype=state_dtype, num_steps=5, scaling=scaling)
    case = half_clipped(case)
    chunk = {"chunk_elems": None} if state_dtype == "int8" else {}
    with case.engine(tmp_path, **EVERYTHING, **chunk) as engine:
        ours = train_offloaded(engine, case)
        assert undone(engine)
        assert engine._parts.speculator.history.kept_elems > 0
    assert_same(ours, train_in_memory(case))


def test_frozen_tensors_of_a_unit_are_where_its_weights_are(tmp_path):
    case = half_clipped(Case(frozen=("up", "norm_1"), num_steps=5))
    with case.engine(tmp_path, **EVERYTHING) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))
        assert undone(engine)


@pytest.mark.parametrize("optimizer", ["lion", torch.optim.Adamax])
def test_other_optimizers_update_copies_too(optimizer, tmp_path):
    """As they do with `hold`."""
    case, found = Case(num_steps=5, clipping=1.0), []
    for overlap in ("hold", "speculate"):
        (folder := tmp_path / overlap).mkdir()
        settings = {**EVERYTHING, "overlap": overlap, "optimizer": optimizer, "lr": 1e-3}
        with case.engine(folder, **settings, params=None) as engine:
            trained = Trained()
            for step in range(case.num_steps):
                engine_step(engine, case, step, trained)
            for name, _ in engine.module.named_parameters():
                trained.masters[name] = engine.full_fp32_param(name)
            assert bool(undone(engine)) is (overlap == "speculate")
            found.append(trained)
    assert_same(*found)


@pytest.mark.parametrize("most", [1, 4])
def test_copies_take_what_the_budget_has_left_and_the_other_units_wait(most, tmp_path):
    case = half_clipped(Case(num_steps=5))
    budget = 3 << 20
    while len(plan_of(case, tmp_path, budget).placement.undo.copied) > most:
        budget -= 16 << 10
    with case.engine(tmp_path, **{**EVERYTHING, "host_memory": budget}) as engine:
        placement, bound = engine.plan.placement, engine._parts.residency.bound
        assert placement.undo.copied
        assert placement.undo.held == {*range(len(bound))} - placement.undo.copied
        assert placement.total_bytes <= budget
        assert engine._parts.ground.memory.slab.num_bytes <= budget
        ours = train_offloaded(engine, case)
        assert undone(engine) == {bound[i].unit.name for i in placement.undo.copied}
    assert_same(ours, train_in_memory(case))


def test_evaluation_between_backward_and_step_sees_the_weights_before(tmp_path):
    case = Case(num_steps=3)
    with case.engine(tmp_path, **EVERYTHING) as engine:
        ours = Trained()
        for step in range(3):
            batch = case.batches(step)[0]
            loss = engine(*batch)
            engine.backward(loss)
            assert ran_ahead(engine) > 0
            with torch.no_grad():
                assert engine(*batch).item() == loss.item()
            before = engine.full_fp32_param("head.weight")
            engine.save_checkpoint(tmp_path / "saved").wait()
            assert torch.equal(engine.full_fp32_param("head.weight"), before)
            engine.step()
            assert not torch.equal(engine.full_fp32_param("head.weight"), before)
            ours.losses.append(loss.item())
            ours.norms.append(engine.grad_norm)
        assert engine._parts.speculator.history.redone_elems == 0
        assert_same(collect_engine(engine, ours), train_in_memory(case))


def test_speculation_that_nothing_can_take_back_is_refused(tmp_path):
    case = Case()
    with pytest.raises(ConfigError, match="no unit stays in memory whole"):
        open_engine(case, tmp_path, **ONE_SIDE, placement="disk")
    with pytest.raises(BudgetError, match=r"a copy of one unit at least.* Raise host_memory"):
        plan_of_the_least(case, tmp_path)


def plan_of_the_least(case: Case, folder: Path) -> Plan:
    budgets = range(3 << 20, 0, -16 << 10)
    return [plan_of(case, folder, budget) for budget in budgets][-1]
