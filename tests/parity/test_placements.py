"""Weights and state in memory or on disk, at every clip rate, with an Inf: the same bits."""

import functools
import math
import random
import re
import tempfile
import time
from pathlib import Path

import pytest
from case import (
    BF16,
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    engine_step,
    train_in_memory,
    train_offloaded,
)

from aio.faults import Fault, Faults
from offload.errors import BudgetError, ConfigError, StateError

TIERS = ("device", "host", "disk")
PLACES = [{"weights": weights, "state": state} for weights in TIERS for state in TIERS]
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


class DelayedCopies:
    """Copies of a device that take a random time, so that they meet transfers in any order."""

    def __init__(self, device, landing, seed: int) -> None:
        self._device = device
        self._landing = landing
        self._random = random.Random(seed)
        self.num_fills = 0

    def fill(self, dst, hi, lo, *, behind=None):
        self.num_fills += 1
        self._wait()
        return self._device.fill(dst, hi, lo, behind=behind)

    def send(self, *args):
        self._wait()
        self._landing.send(*args)

    def __getattr__(self, name):
        return getattr(self._landing, name)

    def _wait(self) -> None:
        if self._random.random() < 0.2:
            time.sleep(self._random.random() * 2e-3)


def delay_blocks(engine, seed: int) -> None:
    """Let any block of the run be overtaken by up to five younger ones, and copies take long."""
    rng = random.Random(seed)
    delays = (Fault.delay(n, rng.randrange(6)) for n in range(20_000))
    Faults(engine._parts.ground.queue).inject(*delays)
    delay_copies(engine, seed)


def delay_copies(engine, seed: int) -> DelayedCopies:
    keeper = engine._parts.keeper
    copies = DelayedCopies(engine._parts.ground.device, keeper._landing, seed)
    engine._parts.residency._fetcher._device = copies
    keeper._landing = copies
    return copies


def train_with_an_inf(engine, case: Case, before_step=lambda: None) -> Trained:
    """Twenty steps; one more, the eighth, has a loss that is not finite."""
    trained = Trained()
    for step in range(NUM_STEPS):
        if step == 7:
            (engine(*case.batches(70)[0]) * math.inf).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            assert engine.skipped_steps == 1
        loss = engine(*case.batches(step)[0])
        engine.backward(loss)
        before_step()
        engine.step()
        trained.losses.append(loss.item())
        trained.norms.append(engine.grad_norm)
    return collect_engine(engine, trained)


@functools.cache
def held_and_serial(bound: float) -> Trained:
    """Everything on disk, nothing overlaps, nothing is delayed; and equal to memory."""
    case = Case(clipping=bound, num_steps=NUM_STEPS)
    with (
        tempfile.TemporaryDirectory() as folder,
        case.engine(Path(folder), overlap="hold") as engine,
    ):
        trained = train_with_an_inf(engine, case)
        assert engine._parts.speculator.history.kept_elems == 0
    assert_same(trained, train_in_memory(case))
    return trained


def written_before_the_norm(engine) -> int:
    """Bytes of the next generation that are on disk between backward and step()."""
    bets = [bet for bet in engine._parts.speculator._bets.values() if bet.takes is not None]
    for bet in bets:
        bet.job.wait()
    return sum(sum(bet.job.stats.write_bytes.values()) for bet in bets)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("place", PLACES, ids=names)
@pytest.mark.parametrize("overlap", ["speculate", pytest.param("auto", marks=pytest.mark.slow)])
def test_twenty_overlapped_steps_equal_the_held_run_wherever_things_are(
    overlap, place, rate, tmp_path
):
    bound = bound_for(RATES[rate])
    case = Case(clipping=bound, num_steps=NUM_STEPS)
    early = []
    with case.engine(tmp_path, placement=place, overlap=overlap, aio_backend="faults") as engine:
        delay_blocks(engine, seed=PLACES.index(place))

        def look() -> None:
            if len(early) % 3:  # in the other steps step() meets updates at work
                early.append(0)
            else:
                early.append(written_before_the_norm(engine))

        ours = train_with_an_inf(engine, case, look)
        history = engine._parts.speculator.history
    assert_same(ours, held_and_serial(bound))
    clipped = num_clipped(ours.norms, bound)
    assert {"none": clipped == 0, "some": 0 < clipped <= 4, "all": clipped == NUM_STEPS}[rate]
    if overlap == "speculate":  # units were written before the norm was known; some of them again
        assert all(num_bytes > 0 for num_bytes in early[::3])
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


@pytest.mark.parametrize("place", ["device", "host"])
def test_evaluation_between_backward_and_step_sees_the_weights_before(place, tmp_path):
    case = Case(num_steps=3)
    settings = {"placement": place, "overlap": "speculate", "host_memory": "64MiB"}
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


@pytest.mark.parametrize("place", ["device", "host"])
def test_edits_and_checkpoints_replace_what_stays(place, tmp_path):
    case = Case(num_steps=6)
    with case.engine(tmp_path, placement=place, host_memory="64MiB") as engine:
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
        pytest.raises(ConfigError, match="placement: expected one of auto, device, host, disk"),
        Case().engine(tmp_path, placement="attic"),
    ):
        pass


@pytest.mark.parametrize(
    ("what", "told"), [("weights", "all weights on the device"), ("state", "state that is placed")]
)
def test_the_device_refuses_more_than_its_budget_and_says_what_would_do(what, told, tmp_path):
    place = {what: "device"}
    least = budget_told(tmp_path, {}, 1)
    enough = budget_told(tmp_path, place, least, told)
    assert enough > least
    with Case().engine(tmp_path, placement=place, device_memory=enough) as engine:
        units = engine.plan.units
        assert {unit.weights if what == "weights" else unit.state for unit in units} == {"device"}


def budget_told(folder, place: dict[str, str], device_memory: int, what: str = "") -> int:
    """The device budget that an error asks for."""
    settings = {"placement": place, "device_memory": device_memory}
    with pytest.raises(BudgetError, match=what or None) as told, Case().engine(folder, **settings):
        pass
    return int(re.search(r"device_memory=(\d+)", str(told.value))[1])


@pytest.mark.parametrize("host_memory", ["16MiB", "260KB"], ids=["host too", "device alone"])
def test_weights_on_the_device_are_filled_once_a_step_and_never_evicted(host_memory, tmp_path):
    case = Case(num_steps=5, accumulation=2)
    place = {"weights": "device", "state": "disk"}
    with case.engine(tmp_path, placement=place, host_memory=host_memory) as engine:
        parts = engine._parts
        ours = Trained()
        for step in range(case.num_steps):
            copies = delay_copies(engine, step)
            engine_step(engine, case, step, ours)
            for bound in parts.residency.bound:
                with pytest.raises(StateError, match="gathered"):  # as any that is evicted
                    bound.parameters[0].sum()
            chunks = [-(-bound.unit.num_elems // 4096) for bound in parts.residency.bound]
            once = len(chunks) if host_memory == "16MiB" else sum(chunks)
            assert copies.num_fills == once
        assert not +engine.metrics.evictions
        read = {key: value for key, value in engine.metrics.read_bytes.items() if value}
        assert not any(key.startswith("backward.param") for key in read)
        assert any(key.startswith("forward.") for key in read) is (host_memory != "16MiB")
        assert_same(collect_engine(engine, ours), train_in_memory(case))


def test_what_the_device_budget_has_left_keeps_front_units(tmp_path):
    case = Case(options=(("num_blocks", 6),), num_steps=4, clipping=1.65)
    budget = budget_told(tmp_path, {}, 1) + 150_000  # a block and a half
    with case.engine(tmp_path, placement="auto", device_memory=budget) as engine:
        kept = engine.plan.placement.kept
        names = [unit.name for unit in engine._parts.ground.blueprint.units if unit.index in kept]
        assert {"embed", "blocks.0"} <= {*names}
        assert not {f"blocks.{number}" for number in range(1, 6)} & {*names}
        assert_same(train_offloaded(engine, case), train_in_memory(case))
