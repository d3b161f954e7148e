"""What a step moves between DISK and HOST: the exact account that the counters must equal (T3).

    forward    weights of each unit on the trace, unless they stay in host memory; each micro-step
               anew, but in layer-major order, and for units that stay on the device
    backward   the same, less those and the unit with which forward ended; spilled gradients
    update     every role of every unit with gradients: read, unless it stays or is made from the
               master, and written, unless memory alone keeps it (durability "none")

Under the assumption of the trace: every trainable parameter gets a gradient, nothing is clipped
where updates run ahead.  These read less by what `lent` says at most: weights fetched for backward
serve the update too, as far as slots are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload.partition.chunk import chunks_of, segments_of, state_chunks
from offload.partition.states import MOMENTS
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up
from offload.schedule.device import weight_bytes
from offload.schedule.placement import Formats, Placement

LENT_SHARE = 0.5  # of what updates could take from fetches; the rest has left its slot before


@dataclass(frozen=True)
class Uses:
    """The order in which a micro-step uses units, and how many micro-steps a step has."""

    forward: Sequence[int]
    backward: Sequence[int]
    micro_steps: int = 1
    by_layers: bool = False  # all micro-steps through a unit before the next

    @classmethod
    def guessed(cls, num_units: int, micro_steps: int, *, by_layers: bool = False) -> Uses:
        """Each unit once, in the model's order; before anything was observed."""
        return cls(range(num_units), range(num_units)[::-1], micro_steps, by_layers)

    @property
    def passes(self) -> int:
        """How often a step fetches weights for forward and backward."""
        return 1 if self.by_layers else self.micro_steps


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step by "phase.role"."""

    read: Mapping[str, int]
    written: Mapping[str, int]
    lent: int = 0  # of `read`, the most that updates ahead of step() need not read

    def likely_read(self, *, held: bool) -> int:
        """Bytes read where updates run ahead and find some of what was fetched, or are `held`."""
        return sum(self.read.values()) - (0 if held else int(LENT_SHARE * self.lent))

    @property
    def total(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())


@dataclass(frozen=True)
class Layout:
    """What decides the traffic of a step, beside its trace."""

    units: Sequence[Unit]  # by index
    persistent: Unit | None
    placement: Placement
    formats: Formats
    weight_capacity: int  # DEVICE bytes for weights of units that come and go
    leaving: int = 0  # DEVICE bytes for gradients on their way out beside a unit at work

    @property
    def all_units(self) -> tuple[Unit, ...]:
        """All units, the persistent one last."""
        return (*self.units, *([self.persistent] if self.persistent else []))

    def taken_bytes(self, unit: Unit) -> int:
        """Read and written where a micro-step's gradients of `unit` leave the device."""
        return unit.trainable_elems * (self.formats.compute_of(unit) + self.formats.grad_of(unit))

    def stays(self, unit: Unit, role: Role) -> bool:
        """True when this buffer is not read in a step."""
        if self.persistent is not None and unit.index == self.persistent.index:
            return True
        return self.placement.stays(unit.index, role)


def step_traffic(layout: Layout, uses: Uses, *, first: bool = False) -> Traffic:
    """Count a step; `first`: moments are known to be zero and not read."""
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    forward, backward = fetches(layout, uses)
    for phase, fetched in (("forward", forward), ("backward", backward)):
        for index in fetched:
            times = 1 if index in layout.placement.kept else uses.passes
            for role, num_bytes in fetch_bytes(layout, index).items():
                read[f"{phase}.{role.value}"] += times * num_bytes
    lent = 0
    for unit in layout.all_units:
        comes, goes = state_bytes(layout, unit, first=first)
        for role, num_bytes in goes.items():
            written[f"update.{role.value}"] += num_bytes
        for role, num_bytes in comes.items():
            read[f"update.{role.value}"] += num_bytes
            lent += num_bytes if role in unit.states.weights.lent else 0
        once, last = spilled_bytes(layout, unit)
        written["backward.grad"] += uses.micro_steps * once
        read["backward.grad"] += (uses.micro_steps - 1) * once
        read["update.grad"] += last
    return Traffic(+read, +written, lent)


def fetches(layout: Layout, uses: Uses) -> tuple[list[int], list[int]]:
    """The units that forward and backward of a micro-step fetch, in order.

    One that stays on the device: in the first micro-step, since the step before has updated it.
    """
    here = {
        unit.index
        for unit in layout.units
        if all(layout.stays(unit, role) for role in unit.states.weights.fetched)
    }
    kept = layout.placement.kept
    updated = {index for index in kept if layout.units[index].trainable_elems}
    forward = list(dict.fromkeys(index for index in uses.forward if index in updated))
    forward += [index for index in uses.forward if index not in kept]
    turning = [index for index in list(uses.forward)[-1:] if index not in kept]
    others = [index for index in uses.backward if index not in kept]
    backward = list(_backward_fetches(layout, others, turning))
    return (
        [index for index in forward if index not in here],
        [index for index in backward if index not in here],
    )


def _backward_fetches(layout: Layout, order: Sequence[int], turning: list[int]) -> Iterator[int]:
    """A unit leaves after its last use, one with frozen tensors or any when there is no room, least
    recently used first."""
    present = list(turning)
    last = {index: place for place, index in enumerate(order)}
    for place, index in enumerate(order):
        if index in present:
            present.remove(index)
        else:
            while present and _gathered(layout, [*present, index]) > layout.weight_capacity:
                present.pop(0)
            yield index
        frozen = any(not slot.tensor.trainable for slot in layout.units[index].slots)
        if last[index] != place or frozen:
            present.append(index)


def _gathered(layout: Layout, units: Sequence[int]) -> int:
    return weight_bytes([layout.units[index] for index in units], layout.formats)


def fetch_bytes(layout: Layout, index: int) -> dict[Role, int]:
    """Of each role of a unit's weights, chunk by chunk."""
    unit = layout.units[index]
    chunks = list(chunks_of(unit.num_elems, layout.placement.chunk_elems))
    return {
        role: sum(
            round_up(unit.states.weights.elem_bytes(role) * chunk.num_elems, STORE_ALIGN_BYTES)
            for chunk in chunks
        )
        for role in unit.states.weights.fetched
    }


def state_bytes(
    layout: Layout, unit: Unit, *, first: bool = False
) -> tuple[dict[Role, int], dict[Role, int]]:
    """What an update of `unit` reads, and what it writes, by role."""
    comes, goes = {}, {}
    for role, num_bytes in update_bytes(layout, unit):
        if (unit.index, role) not in layout.placement.unwritten:
            goes[role] = num_bytes
        made = (first and role in MOMENTS) or role in unit.states.weights.made
        if not layout.stays(unit, role) and not made:
            comes[role] = num_bytes
    return comes, goes


def update_bytes(layout: Layout, unit: Unit) -> Iterator[tuple[Role, int]]:
    """Bytes of each role as an update moves it, chunk by chunk."""
    chunks = list(state_chunks(unit, layout.placement.chunk_elems)) if unit.trainable_elems else []
    for role in unit.roles:
        sizes = (unit.byte_of(role, c.stop) - unit.byte_of(role, c.start) for c in chunks)
        yield role, sum(round_up(size, STORE_ALIGN_BYTES) for size in sizes)


def spilled_bytes(layout: Layout, unit: Unit) -> tuple[int, int]:
    """Gradients that host memory cannot hold: what each micro-step writes, and the next reads; what
    the update reads."""
    if unit.index not in layout.placement.spilled:
        return 0, 0
    size = layout.formats.grad_of(unit)
    chunks = chunks_of(unit.trainable_elems, layout.placement.chunk_elems)
    once = sum(
        round_up(chunk.num_elems * size, STORE_ALIGN_BYTES)
        for chunk in chunks
        if any(segment.slot.tensor.trainable for segment in segments_of(unit, chunk))
    )
    last = sum(
        round_up(chunk.num_elems * size, STORE_ALIGN_BYTES)
        for chunk in state_chunks(unit, layout.placement.chunk_elems)
    )
    return once, last
