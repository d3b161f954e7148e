"""The times of a step of a small layout, against its traffic, its bound and sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import ELEMS, FORMATS, layout_of

from offload.metrics.bound import Rates
from offload.partition.unit import TensorSpec, lay_out
from offload.schedule.placement import Formats, place
from offload.schedule.resident import Candidate
from offload.schedule.rounds import Pace
from offload.schedule.timetable import Timetable, Transfer, timetable
from offload.schedule.traffic import Layout, Uses, step_traffic

FAST = Rates(1e15, 1e15, 2e15)
SUMS = Formats(weight=2, compute=2, grad=4)


def spilling(layout: Layout) -> Layout:
    """All gradients go to disk."""
    every = frozenset(unit.index for unit in layout.units)
    placement = replace(layout.placement, held=frozenset(), spilled=every)
    return replace(layout, placement=placement)


def found(layout: Layout, uses: Uses, pace: Pace, rates: Rates, **settings: bool) -> Timetable:
    times = timetable(layout, uses, pace, rates, **settings)
    assert times is not None
    return times


def moved(times: Timetable, *kinds: str) -> int:
    return sum(each.num_bytes for each in times.transfers if each.kind in kinds)


def of(times: Timetable, kind: str, unit: str) -> Transfer:
    (one,) = (each for each in times.transfers if (each.kind, each.unit) == (kind, unit))
    return one


@pytest.mark.parametrize("kept", [frozenset(), frozenset([0, 2])])
@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("micro_steps", [1, 2, 3])
def test_what_is_told_is_all_that_a_step_moves(
    micro_steps: int, spilled: bool, kept: frozenset[int]
) -> None:
    layout = layout_of(formats=FORMATS if micro_steps == 1 else SUMS)
    layout = spilling(layout) if spilled else layout
    layout = replace(layout, placement=replace(layout.placement, kept=kept))
    uses = Uses.guessed(3, micro_steps)
    times = found(layout, uses, Pace(1, 2), FAST)
    traffic = step_traffic(layout, uses)
    reads = moved(times, "forward", "backward", "state", "spilled")
    assert reads == sum(traffic.read.values())
    assert moved(times, "write", "spill") == sum(traffic.written.values())
    assert moved(times, "forward") == sum(
        size for name, size in traffic.read.items() if name.startswith("forward.")
    )


def test_what_stays_in_memory_is_not_read_and_what_is_not_written_is_not_told() -> None:
    layout = layout_of()
    unit = layout.units[1]
    every = tuple(Candidate(1, role, 0, 1) for role in unit.roles)
    placement = replace(
        layout.placement, resident=every, unwritten=frozenset((1, role) for role in unit.roles)
    )
    times = found(replace(layout, placement=placement), Uses.guessed(3, 1), Pace(1, 2), FAST)
    assert unit.name not in {each.unit for each in times.transfers}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("mixed", [0.0, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("micro_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("seconds", [0.1, 1.0, 10.0])
def test_a_step_is_at_least_its_bound_and_every_transfer_lies_between_its_uses(
    seconds: float, micro_steps: int, mixed: float, held: bool
) -> None:
    layout = layout_of(6, formats=FORMATS if micro_steps == 1 else SUMS)
    uses = Uses.guessed(6, micro_steps)
    traffic = step_traffic(layout, uses)
    reads, writes = (sum(part.values()) for part in (traffic.read, traffic.written))
    rate = float(writes)  # a second each, at least
    rates = Rates(rate, rate, mixed * rate)
    times = found(layout, uses, Pace(seconds / 3, seconds / 2, 0.0, seconds / 6), rates, held=held)
    drive = max(reads / rate, 1.0, (reads + writes) / (mixed * rate) if mixed else 0.0)
    assert times.step_s >= max(seconds, drive) - 1e-9
    assert times.stall_s == pytest.approx(times.step_s - seconds, abs=1e-9)
    assert len(times.channels) == (2 if mixed in (0.0, 2.0) else 1)
    for each in times.transfers:
        assert each.opens_s - 1e-6 <= each.start_s < each.end_s <= each.use_s + 1e-9
    starts = [each.start_s for each in times.transfers]
    assert starts == sorted(starts)


def test_fast_drives_leave_nothing_to_wait_for_and_everything_may_start_just_in_time() -> None:
    times = found(layout_of(), Uses.guessed(3, 1), Pace(3, 6, 0.0, 1.0), FAST)
    assert times.stall_s == pytest.approx(0.0, abs=1e-6)
    assert times.forward_s == pytest.approx(7.0)
    assert times.step_s == pytest.approx(10.0)
    # The last unit is still there from forward; each takes two seconds of backward.
    assert {each.unit for each in times.transfers if each.kind == "backward"} == {
        "blocks.0", "blocks.1",
    }  # fmt: skip
    assert of(times, "backward", "blocks.0").start_s == pytest.approx(4.0)
    assert of(times, "forward", "blocks.2").start_s == pytest.approx(9.0)
    written = of(times, "write", "blocks.2")
    assert written.opens_s == pytest.approx(2.0)
    assert written.start_s == pytest.approx(9.0)
    assert times.slots == {"forward": 1, "backward": 1, "update": 1}


def test_the_front_unit_has_the_least_time_and_its_chain_is_the_stall() -> None:
    """Its last gradient comes when backward ends: then it is written and read, and compute waits.

    The small tensors are written with it, since they are needed as early.
    """
    layout = layout_of()
    uses = Uses.guessed(3, 1)
    rate = 12 * ELEMS / 0.1  # a unit's state is written in a tenth of a second
    times = found(layout, uses, Pace(30, 60), Rates(rate, rate))
    weights = 2 * ELEMS / rate
    assert times.stall_s == pytest.approx(0.1 + weights, rel=0.01)
    least = min(times.transfers, key=lambda each: each.spare_s)
    assert least.unit == "blocks.0"
    assert of(times, "state", "blocks.0").start_s < 60


def test_spilled_gradients_are_written_when_they_are_complete_and_read_for_the_update() -> None:
    times = found(spilling(layout_of()), Uses.guessed(3, 1), Pace(3, 6, 0.0, 2.0), FAST)
    spill, back = of(times, "spill", "blocks.1"), of(times, "spilled", "blocks.1")
    assert spill.opens_s == pytest.approx(4.0)
    assert spill.end_s <= back.start_s + 1e-9
    assert back.use_s == spill.use_s == pytest.approx(9.0)


def test_embeddings_take_no_time_to_compute() -> None:
    layout, uses = layout_of(), Uses.guessed(3, 1)
    pace = Pace(3, 6, looked_up=frozenset([0]))
    times = found(layout, uses, pace, FAST)
    assert of(times, "forward", "blocks.1").use_s == pytest.approx(6.0)
    assert of(times, "forward", "blocks.2").use_s == pytest.approx(7.5)
    nothing = replace(pace, looked_up=frozenset([0, 1, 2]))
    assert of(found(layout, uses, nothing, FAST), "forward", "blocks.1").use_s == pytest.approx(7)


def test_held_updates_begin_when_backward_has_ended() -> None:
    layout, uses = layout_of(), Uses.guessed(3, 1)
    for held, opens in ((False, 2.0), (True, 6.0)):
        times = found(layout, uses, Pace(3, 6), FAST, held=held)
        assert of(times, "write", "blocks.2").opens_s == pytest.approx(opens)


def test_a_drive_that_is_behind_bounds_the_step_and_needs_more_slots() -> None:
    layout, uses = layout_of(6), Uses.guessed(6, 1)
    traffic = step_traffic(layout, uses)
    rates = Rates(traffic.total / 8, traffic.total / 8, traffic.total / 8)
    behind, ahead = (found(layout, uses, Pace(n, 2 * n), rates) for n in (2, 200))
    assert behind.step_s == pytest.approx(8.0)
    assert behind.stall_s == pytest.approx(2.0)
    assert ahead.slots["forward"] == ahead.slots["backward"] == 1
    assert behind.slots["backward"] > 1


def test_a_unit_of_several_chunks_needs_a_slot_for_each_when_it_is_used() -> None:
    layout = layout_of()
    placement = place(
        layout.units, layout.persistent, FORMATS, host_memory=1 << 24, chunk_elems=ELEMS // 2
    )
    layout = replace(layout, placement=placement)
    times = found(layout, Uses.guessed(3, 1), Pace(3, 6), FAST)
    assert times.slots["forward"] == times.slots["backward"] == 2


def test_what_is_read_before_forward_for_its_first_unit_counts() -> None:
    """While the script works, that unit is written and read; the others are small beside it."""
    layout = layout_of(2)
    large = lay_out("blocks.0", 0, [TensorSpec("w0", (64 * 8, 128))])
    layout = replace(layout, units=[large, layout.units[1]])
    times = found(layout, Uses.guessed(2, 1), Pace(3, 6, 0.0, 5.0), FAST)
    assert times.slots["forward"] == 8
    assert times.slots["backward"] == 8
    without = replace(layout, placement=replace(layout.placement, kept=frozenset([0])))
    times = found(without, Uses.guessed(2, 1), Pace(3, 6, 0.0, 5.0), FAST)
    assert times.slots["backward"] == 0  # the other one is still there from forward


def test_without_units_there_are_no_times() -> None:
    assert timetable(layout_of(), Uses([], []), Pace(1, 2), FAST) is None


def test_the_table_tells_each_kind_once_and_the_slots_that_there_are() -> None:
    layout = layout_of()
    times = found(layout, Uses.guessed(3, 1), Pace(3, 6), FAST)
    lines = list(times.lines(layout.placement))
    assert lines[0].endswith("the next backward at 9.000, 0.000 of it waiting")
    assert [line[2:22].strip() for line in lines[2:-1]] == [
        "weights, forward", "weights, backward", "state, read", "state, written",
    ]  # fmt: skip
    several = found(layout_of(formats=SUMS), Uses.guessed(3, 7), Pace(3, 6), FAST)
    assert "3 of 7 passes" in list(several.lines(layout.placement))[1]
    assert f"there are {layout.placement.fetch_slots} for weights" in lines[-1]
