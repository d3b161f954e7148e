"""Latest starts, least stall and fewest slots against every schedule that there is, in whole units.

The reference tries at each unit of time every task that may run, and none; it knows nothing of
deadlines or orders.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, permutations

import pytest

from offload.schedule.deadlines import Piece, Task, ahead, latest, opening, soonest

State = tuple[int, ...]  # units left of each task


def some(
    seed: int, *, channels: Sequence[str] = ("disk",), opens: bool = True
) -> tuple[list[Task], list[int]]:
    """A small problem: chains of a read, an update's write and the next fetch among them."""
    chance = random.Random(seed)
    uses = [chance.randint(0, 4) for _ in range(chance.randint(2, 4))]
    tasks: list[Task] = []
    opened: list[int] = []  # the last use that each needs, itself or through others
    for index in range(chance.randint(1, 5)):
        due = chance.randrange(1, len(uses))
        opens_at = chance.randrange(due) if opens and chance.random() < 0.5 else None
        after: tuple[int, ...] = ()
        before = chance.randrange(index) if index else 0
        if index and chance.random() < 0.4 and opened[before] < due:
            after = (before,)
        opened.append(max([-1 if opens_at is None else opens_at, *(opened[i] for i in after)]))
        channel, seconds = chance.choice(channels), chance.randint(1, 2)
        tasks.append(Task(channel, seconds, due, opens_at, after))
    return tasks, uses


def may_run(tasks: Sequence[Task], left: State) -> Iterator[int]:
    for index, task in enumerate(tasks):
        if left[index] and not any(left[before] for before in task.after):
            yield index


def least_end(tasks: Sequence[Task], uses: Sequence[int]) -> int:
    """The least time in which all uses can end, by trying everything, on any channels."""
    channels = sorted({task.channel for task in tasks})

    @cache
    def rest(left: State, use: int, spent: int) -> int:
        """From here; `spent` units of `use` are done, unless it has not begun."""
        while use < len(uses) and spent == uses[use] and not waits(left, use):
            use, spent = use + 1, 0
        if use == len(uses):
            return 0
        runs = not waits(left, use)
        best = 10**6
        for chosen in choices(left, use):
            then = list(left)
            for index in chosen:
                then[index] -= 1
            if runs or chosen:
                best = min(best, 1 + rest(tuple(then), use, spent + runs))
        return best

    def waits(left: State, use: int) -> bool:
        return any(left[i] for i, task in enumerate(tasks) if task.due <= use)

    def choices(left: State, use: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [()]
        for channel in channels:
            here = [
                i for i in may_run(tasks, left)
                if tasks[i].channel == channel and (tasks[i].opens is None or tasks[i].opens < use)
            ]  # fmt: skip
            found = [(*chosen, *more) for chosen in found for more in [(), *((i,) for i in here)]]
        return found

    return rest(tuple(int(task.seconds) for task in tasks), 0, 0)


def reachable(
    tasks: Sequence[Task], uses: Sequence[int], starts: Sequence[float]
) -> list[set[State]]:
    """At each time, what may be left of the tasks in schedules on one channel that keep all
    deadlines."""

    def late(left: State, time: int) -> bool:
        return any(left[i] and starts[task.due] <= time for i, task in enumerate(tasks))

    def then(left: State, time: int) -> Iterator[State]:
        yield left
        for i in may_run(tasks, left):
            use = tasks[i].opens
            if use is None or starts[use] + uses[use] <= time:
                yield tuple(units - (index == i) for index, units in enumerate(left))

    begin = tuple(int(task.seconds) for task in tasks)
    times = [{begin}]
    for time in range(int(max(starts, default=0))):
        times.append({after for left in times[-1] for after in then(left, time)})
    times[-1] = {left for left in times[-1] if not late(left, len(times) - 1)}
    for time in range(len(times) - 2, -1, -1):
        times[time] = {
            left for left in times[time]
            if not late(left, time) and any(next in times[time + 1] for next in then(left, time))
        }  # fmt: skip
    return times


def done_by(pieces: Sequence[Sequence[Piece]], time: float) -> float:
    return sum(
        max(0, min(piece.stop, time) - piece.start) for each in pieces for piece in each
    )  # fmt: skip


def check_possible(
    tasks: Sequence[Task], uses: Sequence[int], starts: Sequence[float],
    pieces: Sequence[Sequence[Piece]],
) -> None:  # fmt: skip
    """No channel does two things at once, nothing is early and nothing late."""
    opened = opening(tasks, uses, starts)
    for index, task in enumerate(tasks):
        mine = pieces[index]
        assert sum(piece.stop - piece.start for piece in mine) == task.seconds
        assert mine[0].start >= opened[index]
        assert mine[-1].stop <= starts[task.due]
        assert all(pieces[before][-1].stop <= mine[0].start for before in task.after)
    for channel in {task.channel for task in tasks}:
        mine = [piece for i, task in enumerate(tasks) if task.channel == channel
                for piece in pieces[i]]  # fmt: skip
        mine.sort(key=lambda piece: (piece.start, piece.stop))
        assert all(one.stop <= other.start for one, other in pairwise(mine))


@pytest.mark.parametrize("seed", range(150))
def test_on_one_channel_the_stall_is_the_least_there_is(seed: int) -> None:
    tasks, uses = some(seed)
    found = soonest(tasks, uses)
    assert found.stall == least_end(tasks, uses) - sum(uses)
    check_possible(tasks, uses, found.starts, found.pieces)


@pytest.mark.parametrize("seed", range(150))
def test_the_latest_starts_work_and_no_schedule_has_done_less_at_any_time(seed: int) -> None:
    tasks, uses = some(seed)
    soon = soonest(tasks, uses)
    starts, pieces = soon.starts, latest(tasks, uses, soon)
    check_possible(tasks, uses, starts, pieces)
    total = sum(task.seconds for task in tasks)
    for time, states in enumerate(reachable(tasks, uses, starts)):
        most_left = max(map(sum, states))  # so one unit later than planned, one would be late
        assert done_by(pieces, time) == total - most_left


def test_of_all_orders_of_six_fetches_none_stalls_less_or_starts_later() -> None:
    uses = [2, 1, 3, 0, 2, 1, 4]
    for seed in range(3):
        chance = random.Random(seed)
        dues = [chance.randrange(1, 7) for _ in range(6)]
        tasks = [Task("disk", chance.randint(1, 4), due) for due in dues]
        found = soonest(tasks, uses)
        starts = found.starts
        pieces = latest(tasks, uses, found)
        in_order = [pieces[i][0].start for i in sorted(range(6), key=lambda i: tasks[i].due)]
        assert in_order == sorted(in_order)
        planned = in_order[0]
        stalls, begins = [], []
        for order in permutations(tasks):
            stalls.append(_in_order(order, uses) - sum(uses))
            last = float("inf")
            for task in reversed(order):
                last = min(last, starts[task.due]) - task.seconds
            begins.append(last)
        assert found.stall == min(stalls)
        assert planned == max(begins)


def _in_order(order: Sequence[Task], uses: Sequence[int]) -> float:
    """When the last use ends if the fetches come one after another in this order."""
    ends: dict[int, float] = {}
    now: float = 0
    for task in order:
        now += task.seconds
        ends[task.due] = now
    clock: float = 0
    for use, seconds in enumerate(uses):
        clock = max(clock, ends.get(use, 0)) + seconds
    return clock


def test_on_two_channels_the_stall_is_possible_and_seldom_more_than_the_least() -> None:
    least = 0
    for seed in range(100):
        tasks, uses = some(seed, channels=("read", "write"))
        found = soonest(tasks, uses)
        check_possible(tasks, uses, found.starts, found.pieces)
        check_possible(tasks, uses, found.starts, latest(tasks, uses, found))
        more = found.stall - (least_end(tasks, uses) - sum(uses))
        assert more >= 0
        least += more == 0
    assert least >= 95


def test_what_an_urgent_task_needs_is_as_urgent() -> None:
    tasks = [Task("disk", 1, 3), Task("disk", 1, 1, after=(0,)), Task("disk", 3, 2)]
    uses = [2, 1, 5, 1]
    assert soonest(tasks, uses).stall == least_end(tasks, uses) - sum(uses) == 2


def test_where_the_channel_suffices_nothing_waits_and_everything_starts_just_in_time() -> None:
    tasks = [Task("disk", 2, due) for due in (1, 2, 3)]
    uses = [3, 3, 3, 3]
    found = soonest(tasks, uses)
    assert found.stall == 0
    starts = [each[0].start for each in latest(tasks, uses, found)]
    assert starts == [1, 4, 7]


def test_slots_hold_what_was_read_ahead_until_it_is_used() -> None:
    tasks = [Task("disk", 4, 1), Task("disk", 4, 2)]
    uses = [8, 2, 1]  # the second fetch has two units of time after the first is used
    soon = soonest(tasks, uses)
    starts, pieces = soon.starts, latest(tasks, uses, soon)
    ends = [starts[task.due] for task in tasks]
    assert [each[0].start for each in pieces] == [2, 6]
    assert ahead(pieces, tasks, ends, [4, 4], (0, 20)) == 4 + 2
    assert ahead(pieces, tasks, ends, [4, 4], (8, 20)) == 4
    assert ahead(pieces, tasks, ends, [4, 4], (0, 3)) == 1


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_reads_less_ahead(seed: int) -> None:
    """Fetches of one unit of time each, a slot each: the peak is the least of all schedules."""
    tasks, uses = some(seed, opens=False)
    tasks = [Task("disk", task.seconds, task.due) for task in tasks]
    soon = soonest(tasks, uses)
    starts, pieces = soon.starts, latest(tasks, uses, soon)
    ends = [starts[task.due] for task in tasks]
    sizes = [int(task.seconds) for task in tasks]
    most = ahead(pieces, tasks, ends, sizes, (0, 10**6))
    # Just before each end, the slots of what is done and not yet used.
    peaks = [0]
    for time, states in enumerate(reachable(tasks, uses, starts)):
        if time in ends:
            used = sum(size for size, end in zip(sizes, ends, strict=True) if end < time)
            peaks.append(sum(sizes) - max(map(sum, states)) - used)
    assert most == max(peaks)
