"""Divide the host budget: what is held where, how large a chunk is, how many slots each stream
gets.

    host budget  = persistent state + fetch, update and spill slots + held gradients + resident
                   (small tensors)    (weights in, the chain, gradients out)         (resident.py)
                   + landing slots, where gradients come from a device with memory of its own
                 + copies to go back to (undo.py)

The device budget is divided in device.py.

Slots take a third of the host budget until they are as many and as large as pays, less where all
gradients fit then; where the smallest ones need more, as few as work.  So what is left for
gradients, weights and state grows with the budget.  Gradients of the front units come first: they
are produced last and needed first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.errors import BudgetError
from offload.partition.states import FP32_MOMENTS, StateTable
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up
from offload.schedule.resident import Candidate, choose
from offload.schedule.undo import HELD, Undo

MAX_CHUNK_ELEMS = 1 << 20  # 4 Mi gained nothing and moved in lumps
SUM_BYTES = 4  # of a gradient in a slot: any may become an fp32 sum
MIN_FETCH, MIN_UPDATE, MIN_SPILL, MIN_LANDING = 3, 2, 2, 2
MAX_FETCH, PREFERRED_UPDATE, PREFERRED_SPILL = 64, 16, 4
WIDE = 16  # steps from as few slots as work to as many as pay
SLOT_SHARE = 1 / 3  # of the host budget, unless slots need more


@dataclass(frozen=True)
class Formats:
    """Bytes per element of what moves and of what computes."""

    weight: int  # 2: 16-bit weights move; 4: whole ones, of some units at least
    compute: int
    grad: int  # as kept: 2 for one micro-step in 16 bits, else 4
    states: StateTable = FP32_MOMENTS
    landing: int = 0  # of a gradient that is copied from the device; 0: it is read where it is

    def compute_of(self, unit: Unit) -> int:
        """Bytes on the device of a weight of `unit`, or of its gradient."""
        return 4 if unit.states.weights.exact else self.compute

    def grad_of(self, unit: Unit) -> int:
        """Bytes of a kept gradient of `unit`."""
        return 4 if unit.states.weights.exact else self.grad


@dataclass(frozen=True)
class Placement:
    """The division of the host budget, in bytes of one slab."""

    chunk_elems: int
    fetch_slots: int
    fetch_slot_bytes: int
    update_slots: int
    update_slot_bytes: int
    spill_slots: int
    spill_slot_bytes: int
    persistent_bytes: int
    held: frozenset[int]  # units whose gradients stay in host memory
    spilled: frozenset[int]
    held_bytes: int
    resident: tuple[Candidate, ...] = ()  # buffers that stay in host memory
    on_device: tuple[Candidate, ...] = ()  # ... and in the device budget
    kept: frozenset[int] = frozenset()  # units whose weights stay gathered on the device
    unwritten: frozenset[tuple[int, Role]] = frozenset()  # ... of which steps write nothing
    landing_slots: int = 0
    landing_slot_bytes: int = 0
    undo: Undo = HELD  # of updates that run ahead of step()

    @property
    def resident_bytes(self) -> int:
        return sum(each.num_bytes for each in self.resident)

    @property
    def on_device_bytes(self) -> int:
        return sum(each.num_bytes for each in self.on_device)

    def stays(self, unit: int, role: Role) -> bool:
        """True when this buffer is not read in a step."""
        both = (*self.resident, *self.on_device)
        return any((each.unit, each.role) == (unit, role) for each in both)

    @property
    def slot_bytes(self) -> int:
        return (
            self.fetch_slots * self.fetch_slot_bytes
            + self.update_slots * self.update_slot_bytes
            + self.spill_slots * self.spill_slot_bytes
            + self.landing_slots * self.landing_slot_bytes
        )

    @property
    def total_bytes(self) -> int:
        parts = self.persistent_bytes + self.slot_bytes + self.held_bytes + self.resident_bytes
        return parts + self.undo.num_bytes


def grad_bytes(unit: Unit, formats: Formats) -> int:
    """Host bytes of a unit's kept gradients."""
    return round_up(unit.trainable_elems * formats.grad_of(unit), STORE_ALIGN_BYTES)


def persistent_host_bytes(persistent: Unit | None) -> int:
    """Host bytes of the small tensors' state and gradients, each role padded."""
    if persistent is None:
        return 0
    weights = persistent.states.weights  # frozen tensors keep their masters too
    sizes = [persistent.num_elems * weights.elem_bytes(role) for role in weights.roles]
    sizes += [persistent.role_bytes(role) for role in persistent.roles if role not in weights.roles]
    sizes.append(persistent.trainable_elems * SUM_BYTES)
    return sum(round_up(size, STORE_ALIGN_BYTES) for size in sizes)


def place(
    units: Sequence[Unit], persistent: Unit | None, formats: Formats, *,
    host_memory: int | None, chunk_elems: int | None = None, offered: Sequence[Candidate] = (),
) -> Placement:  # fmt: skip
    """Divide `host_memory` bytes (None: as much as moving needs); raises BudgetError with the least
    that works.

    `units` are in forward order, `persistent` left out.  `chunk_elems` fixes the chunk.
    `offered`: what may stay in host memory, most useful first.
    """
    multiple = formats.states.chunk_multiple
    ceiling = round_up(max((unit.num_elems for unit in units), default=1), multiple)
    smallest = multiple if chunk_elems is None else min(chunk_elems, ceiling)
    largest = smallest if chunk_elems is not None else min(MAX_CHUNK_ELEMS, ceiling)
    fixed = persistent_host_bytes(persistent)
    grads = sum(grad_bytes(unit, formats) for unit in units)
    budget = host_memory or 0
    if host_memory is None:
        widest = _slots(largest, ceiling, formats, width=WIDE, spill=False)
        budget = int((fixed + widest.slot_bytes + grads) / SLOT_SHARE)
    options = [(chunk, WIDE) for chunk in range(largest, smallest - 1, -multiple)]
    options += [(smallest, width) for width in range(WIDE - 1, -1, -1)]
    for spill, (chunk, width) in itertools.product((False, True), options):
        slots = _slots(chunk, ceiling, formats, width=width, spill=spill)
        share = slots.slot_bytes / budget if budget else 1.0
        room = budget - fixed - slots.slot_bytes
        if spill:
            fits = room >= 0 and (share <= SLOT_SHARE or width == 0)
        else:  # narrower slots cost less than gradients that go to disk, within reason
            most = (chunk, width) == options[0]
            fits = room >= grads and share <= SLOT_SHARE and (share >= SLOT_SHARE / 2 or most)
        if fits:
            held = _with_gradients(slots, units, formats, fixed=fixed, room=room)
            return replace(held, resident=tuple(choose(offered, room - held.held_bytes)))
    slots = _least_slots(smallest, ceiling, formats)
    raise BudgetError(_host_message(budget, fixed, slots))


def host_least_bytes(units: Sequence[Unit], persistent: Unit | None, formats: Formats) -> int:
    """The least `host_memory`: small tensors' state and slots of the smallest chunk."""
    multiple = formats.states.chunk_multiple
    ceiling = round_up(max((unit.num_elems for unit in units), default=1), multiple)
    slots = _least_slots(multiple, ceiling, formats)
    return persistent_host_bytes(persistent) + slots.slot_bytes


def _least_slots(chunk: int, ceiling: int, formats: Formats) -> Placement:
    return _slots(chunk, ceiling, formats, width=0, spill=True)


def _slots(chunk: int, ceiling: int, formats: Formats, *, width: int, spill: bool) -> Placement:
    """Slots of `chunk` elements: as few as work (`width` 0), as many as pay (WIDE), or between."""
    most_fetch = min(MAX_FETCH, 2 * -(-ceiling // chunk) + 2)
    # Even when nothing is spilled by plan, a second contribution may have to be (gradients.py).
    most_spill = PREFERRED_SPILL if spill else MIN_SPILL
    landing = _between(MIN_LANDING, most_fetch, width) if formats.landing else 0
    return Placement(
        chunk_elems=chunk,
        fetch_slots=_between(MIN_FETCH, most_fetch, width),
        fetch_slot_bytes=chunk * formats.weight,
        update_slots=_between(MIN_UPDATE, PREFERRED_UPDATE, width),
        update_slot_bytes=formats.states.slot_bytes(chunk, SUM_BYTES),
        spill_slots=_between(MIN_SPILL, most_spill, width),
        spill_slot_bytes=chunk * SUM_BYTES,
        persistent_bytes=0,
        held=frozenset(),
        spilled=frozenset(),
        held_bytes=0,
        landing_slots=landing,
        landing_slot_bytes=chunk * formats.landing,
    )


def _between(least: int, most: int, width: int) -> int:
    return least + max(most - least, 0) * width // WIDE


def _with_gradients(
    slots: Placement, units: Sequence[Unit], formats: Formats, *, fixed: int, room: int
) -> Placement:
    held: set[int] = set()
    held_bytes = 0
    for unit in units:
        need = grad_bytes(unit, formats)
        if unit.trainable_elems and held_bytes + need <= room:
            held.add(unit.index)
            held_bytes += need
    spilled = {unit.index for unit in units if unit.trainable_elems} - held
    values = {**slots.__dict__, "persistent_bytes": fixed, "held_bytes": held_bytes}
    return Placement(**{**values, "held": frozenset(held), "spilled": frozenset(spilled)})


def _host_message(host_memory: int, fixed: int, slots: Placement) -> str:
    least = fixed + slots.slot_bytes
    landing = f" + {slots.landing_slots} landing" * bool(slots.landing_slots)
    return (
        f"host_memory is too small: expected at least {least:,} bytes, got {host_memory:,}."
        f" It must hold {fixed:,} bytes of small tensors' state and gradients"
        f" + {slots.slot_bytes:,} bytes of transfer slots"
        f" ({MIN_FETCH} fetch + {MIN_UPDATE} update + {MIN_SPILL} gradient{landing} slots of"
        f" {slots.chunk_elems:,} elements)."
        f" Set host_memory={least} or more."
    )
