"""The times of a step: when each fetch, read of state and write must start, and slots for them.

    trace, bytes, rates, seconds of compute  ->  tasks of three rounds (rounds.py)
    soonest  ->  what compute must wait      latest  ->  when each must start, slots

Time 0 is when backward of the last micro-step begins; what must start before has a negative time.
A unit's share of compute is that of its weights, of embeddings none; updates read what fetches
might have lent them.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload.metrics.bound import Rates
from offload.partition.chunk import chunks_of
from offload.schedule.deadlines import Piece, ahead, latest, opening, soonest
from offload.schedule.placement import Placement
from offload.schedule.rounds import ROUNDS, Clock, Drive, Pace, Rounds
from offload.schedule.traffic import Layout, Uses, step_traffic

TOLD = 1  # of the rounds
KINDS = {
    "forward": "weights, forward", "backward": "weights, backward", "state": "state, read",
    "write": "state, written", "spill": "gradients, written", "spilled": "gradients, read",
}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """What a unit reads or writes at once; times in seconds after time 0."""

    kind: str  # of KINDS
    unit: str
    num_bytes: int
    opens_s: float  # what it needs is there, at the earliest
    start_s: float  # must have started
    end_s: float  # must have ended
    use_s: float  # what needs it begins

    @property
    def spare_s(self) -> float:
        """How long it may wait."""
        return max(self.start_s - self.opens_s, 0.0)


@dataclass(frozen=True)
class Timetable:
    """A step; `transfers` in the order of their latest starts, of `told` of `passes` through the
    model."""

    transfers: Sequence[Transfer]
    forward_s: float  # when the next forward begins
    step_s: float  # with the stall
    stall_s: float  # that is left with everything as early as possible
    channels: Sequence[str]
    slots: Mapping[str, int]  # of a chunk, filled at once: "forward", "backward", "update"
    told: int = 1
    passes: int = 1

    def lines(self, placement: Placement) -> Iterator[str]:
        """For people; `placement`: the slots that there are."""
        yield (
            f"times   in seconds from backward on: the next forward at {self.forward_s:.3f},"
            f" the next backward at {self.step_s:.3f}, {self.stall_s:.3f} of it waiting"
        )
        part = f"{self.told} of {self.passes} passes" if self.told < self.passes else ""
        titles = f"{'number':>6} {'first starts':>13} {'last ends':>10} {'least spare':>12}"
        yield f"  {part:<20} {titles}"
        for kind, name in KINDS.items():
            mine = [each for each in self.transfers if each.kind == kind]
            if mine:
                least = min(mine, key=lambda each: each.spare_s)
                yield (
                    f"  {name:<20} {len(mine):>6} {mine[0].start_s:>13.3f}"
                    f" {max(each.end_s for each in mine):>10.3f} {least.spare_s:>12.3f}"
                    f"  {least.unit}"
                )
        need = ", ".join(f"{name} {count}" for name, count in self.slots.items())
        yield (
            f"  slots that keep to them: {need}; there are {placement.fetch_slots} for weights,"
            f" {placement.update_slots} for updates"
        )


def timetable(
    layout: Layout, uses: Uses, pace: Pace, rates: Rates, *, held: bool = False
) -> Timetable | None:
    """The times of every step but the first; None where no unit comes and goes.

    `held`: updates wait for the norm.
    """
    if not uses.forward or not uses.backward:
        return None
    clock = Clock.of(uses)
    drive = Drive.of(rates, step_traffic(layout, uses))
    rounds = Rounds(layout, uses, clock, drive, update_s=pace.update, held=held)
    seconds = ROUNDS * clock.seconds(layout, pace, uses.passes)
    found = soonest(rounds.tasks, seconds)
    pieces = latest(rounds.tasks, seconds, found)
    begin, end = TOLD * clock.length, (TOLD + 1) * clock.length
    zero = found.starts[begin]
    step_s, compute = found.starts[end] - zero, sum(seconds[begin:end])
    more = uses.passes - clock.passes
    if more:
        one, two = clock.forward_at(TOLD, 2), clock.forward_at(TOLD, 3)
        step_s += more * (found.starts[two] - found.starts[one])
        compute += more * sum(seconds[one:two])
    step_s = max(step_s, drive.bound_s)
    return Timetable(
        _transfers(rounds, pieces, seconds, found.starts, zero),
        found.starts[clock.between_at(TOLD) + 1] - zero, step_s, max(step_s - compute, 0.0),
        drive.channels,
        _slots(layout, rounds, clock, pieces, found.starts), clock.passes, uses.passes,
    )  # fmt: skip


def _transfers(
    rounds: Rounds, pieces: Sequence[Sequence[Piece]], seconds: Sequence[float],
    starts: Sequence[float], zero: float,
) -> list[Transfer]:  # fmt: skip
    """Those of the round that is told, its parts together."""
    parts: dict[tuple[str, int, int], list[int]] = {}
    for index, label in enumerate(rounds.labels):
        if label.turn == TOLD and label.kind in KINDS:
            use = rounds.tasks[index].due  # a unit may be fetched twice in a pass
            parts.setdefault((label.kind, label.unit.index, use), []).append(index)
    opened = opening(rounds.tasks, seconds, starts)
    found = [
        Transfer(
            kind, rounds.labels[mine[0]].unit.name, sum(rounds.labels[i].num_bytes for i in mine),
            min(opened[i] for i in mine) - zero, min(pieces[i][0].start for i in mine) - zero,
            max(pieces[i][-1].stop for i in mine) - zero, starts[use] - zero,
        )
        for (kind, _, use), mine in parts.items()
    ]  # fmt: skip
    return sorted(found, key=lambda transfer: transfer.start_s)


def _slots(
    layout: Layout, rounds: Rounds, clock: Clock, pieces: Sequence[Sequence[Piece]],
    starts: Sequence[float],
) -> dict[str, int]:  # fmt: skip
    """The most of each kind, with every transfer at its latest."""
    chunk = layout.placement.chunk_elems
    mine = [i for i, label in enumerate(rounds.labels) if label.kind in ("forward", "backward")]
    fetched = (
        [pieces[i] for i in mine], [rounds.tasks[i] for i in mine],
        [starts[rounds.tasks[i].due] for i in mine],
        [sum(1 for _ in chunks_of(rounds.labels[i].unit.num_elems, chunk)) for i in mine],
    )  # fmt: skip
    most: Counter[str] = Counter(forward=0, backward=0)
    for one in range(1, clock.passes + 1):
        forward, backward = clock.forward_at(TOLD, one), clock.backward_at(TOLD, one)
        # What the first unit needs is read before forward begins.
        before = clock.between_at(TOLD) if one == 1 else forward
        for phase, first, end in (
            ("forward", before, forward + len(clock.forward)),
            ("backward", backward, backward + len(clock.backward)),
        ):
            held = ahead(*fetched, (starts[first], starts[end]))
            most[phase] = max(most[phase], held)
    updates = (
        [pieces[first] for first, _, _ in rounds.chains],
        [rounds.tasks[first] for first, _, _ in rounds.chains],
        [pieces[last][-1].stop for _, last, _ in rounds.chains],
        [count for _, _, count in rounds.chains],
    )
    window = starts[TOLD * clock.length], starts[(TOLD + 1) * clock.length]
    return {**most, "update": ahead(*updates, window)}
