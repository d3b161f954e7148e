"""The transfers of some rounds of training as tasks with deadlines (deadlines.py).  Pure.

backward  of the last micro-step    units get their gradients: updates open, one by one
forward   of the next step          units need their new weights: updates and writes are due
backward, forward                   of the micro-steps between, of which three are looked at
backward  ...                       and so on, round by round

state in -> update -> out -> weights in, for each unit; the parts of an update follow each other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from offload.metrics.bound import Rates
from offload.partition.chunk import state_chunks
from offload.partition.unit import Unit
from offload.schedule.deadlines import Task
from offload.schedule.traffic import (
    Layout,
    Traffic,
    Uses,
    fetch_bytes,
    fetches,
    spilled_bytes,
    state_bytes,
)

ROUNDS = 3  # the first starts from rest, the last is what comes behind
MAX_PASSES = 3  # of micro-steps; the others are like the second
MAX_PARTS = 150  # of the updates of a round; beyond that several chunks are one part
WRITES = ("write", "spill")


@dataclass(frozen=True)
class Pace:
    """Seconds that a step computes, all micro-steps, without waiting."""

    forward: float
    backward: float
    update: float = 0.0  # kernels and checksums, beside the others
    between: float = 0.0  # from the end of backward to the next forward
    looked_up: frozenset[int] = frozenset()  # units without products, which take no time


@dataclass(frozen=True)
class Drive:
    """Seconds a byte.  Reads and writes that slow each other share one channel, which is busy for
    as long as the bound says; others have one each."""

    read: float
    write: float
    channels: tuple[str, ...]
    bound_s: float  # of a step

    @classmethod
    def of(cls, rates: Rates, traffic: Traffic) -> Drive:
        """A direction of unknown rate has that of mixed traffic, or takes no time."""
        one, other = rates.read or rates.mixed, rates.write or rates.mixed
        read, write = (1 / rate if rate else 0.0 for rate in (one, other))
        comes, goes = sum(traffic.read.values()), sum(traffic.written.values())
        bound = max(comes * read, goes * write)
        if not rates.mixed or rates.mixed >= one + other:
            return cls(read, write, ("reads", "writes"), bound)
        bound = max(bound, (comes + goes) / rates.mixed)
        alone = comes * read + goes * write
        scale = bound / alone if alone else 1.0
        return cls(read * scale, write * scale, ("reads and writes",), bound)

    def channel(self, kind: str) -> str:
        return self.channels[-1] if kind in WRITES else self.channels[0]

    def seconds(self, kind: str, num_bytes: int) -> float:
        return num_bytes * (self.write if kind in WRITES else self.read)


@dataclass(frozen=True)
class Clock:
    """Which use is which: `passes` forwards and backwards a round."""

    forward: Sequence[int]
    backward: Sequence[int]
    passes: int

    @property
    def length(self) -> int:
        return 1 + self.passes * (len(self.forward) + len(self.backward))

    @classmethod
    def of(cls, uses: Uses) -> Clock:
        return cls(uses.forward, uses.backward, min(uses.passes, MAX_PASSES))

    def backward_at(self, turn: int, one: int) -> int:
        """The first use of backward of pass `one`; the last pass begins the round `turn`."""
        if one == self.passes:
            return turn * self.length
        return self.forward_at(turn, one) + len(self.forward)

    def between_at(self, turn: int) -> int:
        return turn * self.length + len(self.backward)

    def forward_at(self, turn: int, one: int) -> int:
        before = (one - 1) * (len(self.forward) + len(self.backward))
        return self.between_at(turn) + 1 + before

    def seconds(self, layout: Layout, pace: Pace, passes: int) -> list[float]:
        """Of each use of a round, of `passes` a step."""
        forward = _shares(layout, self.forward, pace.forward / passes, pace.looked_up)
        backward = _shares(layout, self.backward, pace.backward / passes, pace.looked_up)
        more = (self.passes - 1) * [*forward, *backward]
        return [*backward, pace.between, *more, *forward]


def _shares(
    layout: Layout, order: Sequence[int], seconds: float, looked_up: frozenset[int]
) -> list[float]:
    """By weights that are multiplied; by all where none is."""
    every = [layout.units[index].num_elems for index in order]
    weights = [0 if index in looked_up else each for index, each in zip(order, every, strict=True)]
    weights = weights if any(weights) else every
    return [seconds * weight / sum(weights) for weight in weights]


@dataclass(frozen=True)
class Label:
    """Whose a task is."""

    kind: str  # of KINDS, or "update"
    unit: Unit
    num_bytes: int
    turn: int
    one: int  # pass


class Rounds:
    """The tasks of all rounds."""

    def __init__(
        self, layout: Layout, uses: Uses, clock: Clock, drive: Drive, *,
        update_s: float, held: bool,
    ) -> None:  # fmt: skip
        self.tasks: list[Task] = []
        self.labels: list[Label] = []
        self.chains: list[tuple[int, int, int]] = []  # first task, last task, chunks
        self._layout, self._clock, self._drive, self._held = layout, clock, drive, held
        self._fetched = fetches(layout, uses)
        self._stored: dict[int, tuple[int, ...]] = {}  # by unit: what made what can be read
        self._spilled: dict[int, tuple[int, ...]] = {}
        trained = sum(unit.trainable_elems for unit in layout.all_units)
        self._update_s = update_s / trained if trained else 0.0
        chunks = sum(_num_chunks(layout, unit) for unit in layout.all_units)
        self._part = -(-chunks // MAX_PARTS) or 1
        for turn in range(ROUNDS):
            self._backward(turn, clock.passes)
            for unit in layout.all_units:
                self._update(turn, unit)
            for one in range(1, clock.passes + 1):
                self._forward(turn, one)
                if one < clock.passes:
                    self._backward(turn, one)

    def _add(
        self, kind: str, label: tuple[int, int, Unit], num_bytes: int, due: int, *,
        opens: int | None = None, after: Iterable[int] = (),
    ) -> tuple[int, ...]:  # fmt: skip
        """Append a transfer, unless it is empty; return what to wait for."""
        if not num_bytes:
            return tuple(after)
        seconds = self._drive.seconds(kind, num_bytes)
        self.tasks.append(Task(self._drive.channel(kind), seconds, due, opens, tuple(after)))
        self.labels.append(Label(kind, label[2], num_bytes, label[0], label[1]))
        return (len(self.tasks) - 1,)

    def _forward(self, turn: int, one: int) -> None:
        kept = self._layout.placement.kept
        begin = self._clock.forward_at(turn, one)
        for index, place in _places(self._clock.forward, self._fetched[0], kept):
            if one == 1 or index not in kept:
                self._fetch("forward", turn, one, index, begin + place)

    def _backward(self, turn: int, one: int) -> None:
        begin = self._clock.backward_at(turn, one)
        for index, place in _places(self._clock.backward, self._fetched[1]):
            self._fetch("backward", turn, one, index, begin + place)
        for index in dict.fromkeys(self._clock.backward):
            unit = self._layout.units[index]
            once, _ = spilled_bytes(self._layout, unit)
            label = turn, one, unit
            if one > 1:  # added to what the pass before has spilled
                due = begin + self._clock.backward.index(index)
                self._add("spilled", label, once, due, after=self._spilled.get(index, ()))
            due = self._spill_due(turn, one, unit)
            opens = begin + _last(self._clock.backward, index)
            if due < ROUNDS * self._clock.length:
                self._spilled[index] = self._add("spill", label, once, due, opens=opens)

    def _spill_due(self, turn: int, one: int, unit: Unit) -> int:
        """The last pass's gradients serve the update, others the next pass."""
        if one == self._clock.passes:
            return self._due(turn, unit)
        then = one + 1
        begin = self._clock.backward_at(turn + (then == self._clock.passes), then)
        return begin + self._clock.backward.index(unit.index)

    def _fetch(self, kind: str, turn: int, one: int, index: int, due: int) -> None:
        unit = self._layout.units[index]
        size = sum(fetch_bytes(self._layout, index).values())
        self._add(kind, (turn, one, unit), size, due, after=self._stored.get(index, ()))

    def _update(self, turn: int, unit: Unit) -> None:
        """Read, update and write, in parts of some chunks."""
        count = _num_chunks(self._layout, unit)
        if not count:
            return
        comes, goes = (sum(x.values()) for x in state_bytes(self._layout, unit))
        _, grads = spilled_bytes(self._layout, unit)
        due, order = self._due(turn, unit), self._clock.backward
        place = len(order) - 1 if self._held else _last(order, unit.index)
        opens = turn * self._clock.length + place
        label, made = (turn, self._clock.passes, unit), list[int]()
        for start in range(0, count, self._part):
            stop, first = min(start + self._part, count), len(self.tasks)
            sizes = [size * stop // count - size * start // count for size in (comes, grads, goes)]
            read = self._add("state", label, sizes[0], due, after=self._stored.get(unit.index, ()))
            spilled = self._spilled.get(unit.index, ())
            grad = self._add("spilled", label, sizes[1], due, after=spilled)
            seconds = self._update_s * unit.trainable_elems * (stop - start) / count
            self.tasks.append(Task("updates", seconds, due, opens, tuple({*read, *grad})))
            self.labels.append(Label("update", unit, 0, turn, self._clock.passes))
            done = self._add("write", label, sizes[2], due, after=(len(self.tasks) - 1,))
            made += done
            self.chains.append((first, done[-1], stop - start))
        self._stored[unit.index] = tuple(made)

    def _due(self, turn: int, unit: Unit) -> int:
        """Its first use in the next forward; small tensors are in use from the first unit on."""
        order, begin = self._clock.forward, self._clock.forward_at(turn, 1)
        if unit.index in order:
            return begin + order.index(unit.index)
        return begin if unit is self._layout.persistent else begin + len(order) - 1


def _num_chunks(layout: Layout, unit: Unit) -> int:
    chunk = layout.placement.chunk_elems
    return sum(1 for _ in state_chunks(unit, chunk)) if unit.trainable_elems else 0


def _last(order: Sequence[int], index: int) -> int:
    """The place of the last use; of what is not in the order: of all."""
    return max((place for place, each in enumerate(order) if each == index), default=len(order) - 1)


def _places(
    order: Sequence[int], fetched: Iterable[int], kept: frozenset[int] = frozenset()
) -> Iterator[tuple[int, int]]:
    """Which use each fetch is for; of what is `kept`: the first."""
    begin = 0
    for index in fetched:
        place = list(order).index(index, 0 if index in kept else begin)
        if index not in kept:
            begin = place + 1
        yield index, place
