"""When each transfer must start, so that compute need not wait for it: deadlines, backwards.

    uses     u0 u1 u2 ...            what compute does, in this order, each with its seconds
    tasks    opens | channel | due   may begin when use `opens` and the tasks `after` have ended,
                                     must have ended when use `due` starts; may be interrupted

    soonest  forwards, earliest deadline first: the least that compute must wait
    latest   backwards from the uses' times, the latest opening first: the latest starts
    ahead    what has begun and is not used yet: it fills slots

On one channel both are exact.  Before use k all tasks with a deadline up to k must have ended, in
whatever order; earliest deadline first lets nothing else delay them (Horn 1974 for deadlines and
openings on one machine), and backwards the same holds with time reversed: no other schedule has
less of the work done at any time, so none reads less ahead.  Chains across several channels are a
job shop, where this is a good order and not always the best.  Pure; any numbers that subtract.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-9  # of the whole time
_COMPUTE = "compute"


@dataclass(frozen=True)
class Task:
    """A transfer, or an update.  Those in `after` come before it in the list."""

    channel: str  # what does it, one task at a time
    seconds: float
    due: int  # use that needs it
    opens: int | None = None  # use that it needs
    after: tuple[int, ...] = ()  # tasks that it needs


@dataclass(frozen=True)
class Piece:
    """A time in which a task has its channel, in seconds."""

    start: float
    stop: float


@dataclass(frozen=True)
class Soonest:
    """Every task as early as it can; `starts` of the uses, and what compute waits in all."""

    pieces: Sequence[Sequence[Piece]]  # of each task
    starts: Sequence[float]
    stall: float


@dataclass(frozen=True)
class _Job:
    channel: str
    seconds: float
    rank: tuple[float, ...]  # the least comes first
    after: Sequence[int]
    release: float = 0


def soonest(tasks: Sequence[Task], uses: Sequence[float]) -> Soonest:
    """Run everything, earliest deadline first.  `uses`: seconds of each."""
    first = len(tasks)  # of the uses, which are jobs too
    due = _needed(tasks)
    jobs = []
    for task, needed in zip(tasks, due, strict=True):
        opens = () if task.opens is None else (first + task.opens,)
        jobs.append(_Job(task.channel, task.seconds, (needed,), (*task.after, *opens)))
    before: dict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        before[task.due].append(index)
    for use, seconds in enumerate(uses):
        previous = [first + use - 1] if use else []
        jobs.append(_Job(_COMPUTE, seconds, (use,), [*previous, *before[use]]))
    pieces = _serve(jobs)
    starts = [each[0].start for each in pieces[first:]]
    end = pieces[-1][-1].stop if uses else 0
    return Soonest(pieces[:first], starts, end - sum(uses))


def latest(tasks: Sequence[Task], uses: Sequence[float], soon: Soonest) -> list[list[Piece]]:
    """Every task as late as the starts of the uses in `soon` allow.

    What a chain reads before it opens is put right before the rest of it, which fills few slots;
    where that would make others begin before they open, chains with the least time are freed of it.
    Where several channels allow neither, everything keeps the order that it has in `soon`.
    """
    starts, opened = soon.starts, opening(tasks, uses, soon.starts)
    slack = ROUNDING * max(starts, default=0)
    chains = _of_chains(tasks, uses, starts)
    times = [starts[task.due] - chain for task, chain in zip(tasks, chains, strict=True)]
    steps = sorted(set(times))
    best, low, high = _postponed(tasks, soon), -1, len(steps)
    while low < high:  # freed: chains with a time up to steps[middle], or none
        middle = (low + high) // 2
        least = steps[middle] if middle >= 0 else -math.inf
        ranks = [
            open if time <= least else chain
            for open, time, chain in zip(opened, times, chains, strict=True)
        ]
        pieces = _backwards(tasks, starts, ranks)
        if all(each[0].start >= open - slack for each, open in zip(pieces, opened, strict=True)):
            best, high = pieces, middle
        else:
            low = middle + 1
    return best


def _postponed(tasks: Sequence[Task], soon: Soonest) -> list[list[Piece]]:
    """Each piece as late as what comes behind it lets it, in the order that all have."""
    order = sorted(
        (piece.start, piece.stop, index) for index, each in enumerate(soon.pieces) for piece in each
    )
    ends: list[float] = [soon.starts[task.due] for task in tasks]
    free: dict[str, float] = defaultdict(lambda: math.inf)  # by channel: what comes behind starts
    pieces: list[list[Piece]] = [[] for _ in tasks]
    for start, stop, index in reversed(order):
        task = tasks[index]
        end = min(ends[index], free[task.channel])
        begin = end - (stop - start)
        pieces[index].insert(0, Piece(begin, end))
        free[task.channel] = begin
        for waits in (index, *task.after):
            ends[waits] = min(ends[waits], begin)
    return pieces


def _backwards(
    tasks: Sequence[Task], starts: Sequence[float], opened: Sequence[float]
) -> list[list[Piece]]:
    """With time reversed, what has `opened` last comes first."""
    end = max(starts, default=0)
    count = len(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(count - 1 - index)
    jobs = [
        _Job(
            task.channel, task.seconds, (-opened[index], -task.due), followers[index],
            end - starts[task.due],
        )
        for index, task in reversed(list(enumerate(tasks)))
    ]  # fmt: skip
    return [
        [Piece(end - piece.stop, end - piece.start) for piece in reversed(pieces)]
        for pieces in reversed(_serve(jobs))
    ]


def _of_chains(
    tasks: Sequence[Task], uses: Sequence[float], starts: Sequence[float]
) -> list[float]:  # fmt: skip
    """The end of the use that opens each task, one before it, or the one after it."""
    found: list[float] = []
    for task in tasks:
        own = [] if task.opens is None else [starts[task.opens] + uses[task.opens]]
        found.append(max([*own, *(found[before] for before in task.after)], default=0))
    for index, task in enumerate(tasks):
        for before in task.after if task.opens is not None else ():
            found[before] = max(found[before], found[index])
    return found


def opening(
    tasks: Sequence[Task], uses: Sequence[float], starts: Sequence[float]
) -> list[float]:  # fmt: skip
    """The earliest that each task could begin, were it alone, at these `starts` of the uses."""
    found: list[float] = []
    for task in tasks:
        times = [0.0 * end for end in starts[:1]]  # of the type of the others
        if task.opens is not None:
            times.append(starts[task.opens] + uses[task.opens])
        times += [found[before] + tasks[before].seconds for before in task.after]
        found.append(max(times))
    return found


def ahead(
    pieces: Sequence[Sequence[Piece]], tasks: Sequence[Task], ends: Sequence[float],
    sizes: Sequence[int], window: tuple[float, float],
) -> int:  # fmt: skip
    """The most slots filled at once within `window`, of tasks of which each fills `sizes` slots,
    one after another, and frees them at its `ends`."""
    changes: list[tuple[float, int]] = []
    for index, size in enumerate(sizes):
        whole = tasks[index].seconds
        for place in range(size):
            begins = _when(pieces[index], whole * place / size)
            changes += [(begins, 1), (ends[index], -1)]
    held = most = 0
    for time, change in sorted(changes):  # at one time what frees a slot comes first
        held += change
        if time <= window[0]:
            most = held
        elif time < window[1]:
            most = max(most, held)
    return most


def _when(pieces: Sequence[Piece], done: float) -> float:
    """The time at which a task goes on after `done` seconds."""
    for piece in pieces:
        if done < piece.stop - piece.start:
            return piece.start + done
        done -= piece.stop - piece.start
    return pieces[-1].stop


def _needed(tasks: Sequence[Task]) -> list[int]:
    """The first use that waits for each task, through those after it."""
    due = [task.due for task in tasks]
    for index in range(len(tasks) - 1, -1, -1):
        for before in tasks[index].after:
            due[before] = min(due[before], due[index])
    return due


def _serve(jobs: Sequence[_Job]) -> list[list[Piece]]:
    """Give each channel to the ready job of the least rank, at every moment."""
    waits = [len(job.after) for job in jobs]
    followers: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        for before in job.after:
            followers[before].append(index)
    left = [job.seconds for job in jobs]
    pieces: list[list[Piece]] = [[] for _ in jobs]
    closed = [(job.release, index) for index, job in enumerate(jobs) if not waits[index]]
    heapq.heapify(closed)
    ready: dict[str, list[tuple[tuple[float, ...], int]]] = defaultdict(list)
    now: float = 0
    while closed or any(ready.values()):
        while closed and closed[0][0] <= now:
            index = heapq.heappop(closed)[1]
            heapq.heappush(ready[jobs[index].channel], (jobs[index].rank, index))
        running = [heap[0][1] for heap in ready.values() if heap]
        if not running:
            now = closed[0][0]
            continue
        step = min(left[index] for index in running)
        then = now + step
        if closed and closed[0][0] < then:
            then = closed[0][0]
            step = then - now
        for index in running:
            left[index] -= step
            _extend(pieces[index], now, then)
        now = then
        for index in [index for index in running if left[index] <= 0]:
            heapq.heappop(ready[jobs[index].channel])
            for follower in followers[index]:
                waits[follower] -= 1
                if not waits[follower]:
                    heapq.heappush(closed, (max(jobs[follower].release, now), follower))
    return pieces


def _extend(pieces: list[Piece], start: float, stop: float) -> None:
    if pieces and pieces[-1].stop == start:
        start = pieces.pop().start
    pieces.append(Piece(start, stop))
