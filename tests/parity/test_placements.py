"""Weights and state in memory or on disk, at every clip rate, with an Inf: the same bits."""

import math
import random

import pytest
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
    train_in_memory,
    train_offloaded,
)

from aio.faults import Fault, Faults
from offload.errors import BudgetError, ConfigError

PLACES = [{"weights": w, "state": s} for w in ("host", "disk") for s in ("host", "disk")]
NUM_STEPS = 20
# Which share of the steps is clipped: the norms of the training in memory say which bound gives it.
RATES = {"none": 0.0, "some": 0.05, "all": 1.0}


def names(place: dict[str, str]) -> str:
    return "-".join(place.values())


def bound_for(rate: float) -> float:
    if not rate:
        return 0.0
    norms = sorted(train_in_memory(Case(num_steps=NUM_STEPS)).norms)
    return 1e-3 if rate == 1.0 else norms[-2] * 1.0001  # all but the largest stay below


def num_clipped(norms: list[float], bound: float) -> int:
    return sum(bound > 0 and math.isfinite(norm) and norm > bound for norm in norms)


def delay_blocks(engine, seed: int) -> None:
    """Let any block of the run be overtaken by up to five younger ones."""
    rng = random.Random(seed)
    delays = (Fault.delay(n, rng.randrange(6)) for n in range(20_000))
    Faults(engine._parts.ground.queue).inject(*delays)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("place", PLACES, ids=names)
@pytest.mark.parametrize("overlap", ["speculate", pytest.param("auto", marks=pytest.mark.slow)])
def test_twenty_steps_with_an_inf_equal_memory_wherever_things_are(overlap, place, rate, tmp_path):
    bound = bound_for(RATES[rate])
    case = Case(clipping=bound, num_steps=NUM_STEPS)
    oracle, ours, theirs = case.oracle(), Trained(), Trained()
    with case.engine(tmp_path, placement=place, overlap=overlap, aio_backend="faults") as engine:
        delay_blocks(engine, seed=len(names(place)))
        for step in range(NUM_STEPS):
            if step == 7:
                for loss in (engine(*case.batches(70)[0]), oracle.model(*case.batches(70)[0])):
                    (loss * math.inf).backward()
                oracle.keep_gradients()
                oracle.step()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                assert engine.skipped_steps == 1
            engine_step(engine, case, step, ours)
            oracle_step(oracle, case, step, theirs)
        history = engine._parts.speculator.history
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))
    clipped = num_clipped(ours.norms, bound)
    assert {"none": clipped == 0, "some": 0 < clipped <= 4, "all": clipped == NUM_STEPS}[rate]
    if overlap == "speculate":  # units were written before the norm was known; some of them again
        assert (history.kept_elems > 0) is (rate != "all")
        assert (history.redone_elems > 0) is (rate != "none")


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_what_fits_stays_and_changes_no_number(share, state_dtype, dtype, tmp_path):
    case = Case(dtype=dtype, state_dtype=state_dtype, clipping=1.65, num_steps=5)
    whole = least_for_everything(case, tmp_path / "all")
    with case.engine(
        tmp_path, placement="auto", overlap="speculate", host_memory=int(share * whole)
    ) as engine:
        assert (engine._parts.ground.blueprint.placement.resident_bytes > 0) is True
        assert_same(train_offloaded(engine, case), train_in_memory(case))


def least_for_everything(case: Case, folder) -> int:
    folder.mkdir()
    with case.engine(folder, placement="auto", host_memory="64MiB") as engine:
        return engine._parts.ground.blueprint.placement.total_bytes


def test_with_everything_in_memory_nothing_is_read(tmp_path):
    case = Case(num_steps=3)
    with case.engine(tmp_path, placement="host", host_memory="64MiB") as engine:
        before = engine.metrics.total_read_bytes
        ours = Trained()
        for step in range(case.num_steps):
            engine_step(engine, case, step, ours)
        assert engine.metrics.total_read_bytes == before
        assert engine.metrics.total_write_bytes > 0
        assert_same(collect_engine(engine, ours), train_in_memory(case))


def test_evaluation_between_backward_and_step_sees_the_weights_before(tmp_path):
    case = Case(num_steps=3)
    settings = {"placement": "host", "overlap": "speculate", "host_memory": "64MiB"}
    with case.engine(tmp_path, **settings) as engine:
        for step in range(3):
            batch = case.batches(step)[0]
            loss = engine(*batch)
            engine.backward(loss)
            engine.eval()
            assert engine(*batch).item() == loss.item()
            engine.train()
            engine.step()
            engine.eval()
            assert engine(*batch).item() != loss.item()
            engine.train()


def test_edits_and_checkpoints_replace_what_stays(tmp_path):
    case = Case(num_steps=6)
    with case.engine(tmp_path, placement="host", host_memory="64MiB") as engine:
        ours, again = Trained(), Trained()
        for step in range(2):
            engine_step(engine, case, step, Trained())
        engine.save_checkpoint(tmp_path / "saved").wait()
        for step in range(2, 4):
            engine_step(engine, case, step, ours)
        with engine.gathered():
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.5)
        engine_step(engine, case, 4, Trained())
        engine.load_checkpoint(tmp_path / "saved")
        for step in range(2, 4):
            engine_step(engine, case, step, again)
        assert again.losses == ours.losses
        assert again.norms == ours.norms


def test_what_cannot_stay_is_refused_with_the_sum(tmp_path):
    with (
        pytest.raises(BudgetError, match=r"all state in host memory, [\d,]+ bytes"),
        Case().engine(tmp_path, placement={"state": "host"}, host_memory="500KB"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="placement: expected one of auto, host, disk"),
        Case().engine(tmp_path, placement="attic"),
    ):
        pass
