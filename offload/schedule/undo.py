"""How an update that ran ahead of step() is taken back where weights and state stay in memory.

    copy   it works on a copy, and they change places at step()    every step: a copy of the state
    read   the committed side is read again                        every step that is redone: a read
    hold   it waits for the norm                                   nothing runs ahead

With two sides there is always a committed one: copies are made where they are the cheaper and the
host budget has them left, when all that saves reads has its place.  With one side (durability
"none") the committed side of what is written is overwritten, and what stays is not written at all:
copy or hold.  Held is cheaper there where the model computes on the processors too: no transfer is
left to hide, an update takes the same processors ahead of step() as after it, and the copy comes on
top.  So they are made on a device of its own, or where it is asked to speculate.

Copies are spread evenly over the units, so that neither backward nor the next forward has all of
the updates that wait.  Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from offload.partition.unit import Role, Unit
from offload.schedule.resident import Candidate, spread_order

COPY_BYTES_PER_S = 10e9  # read and written, by one thread; as measured: 12e9
READ_BYTES_PER_S = 1e9  # of drives without a profile
REDONE_SHARE = 1 / 8  # of steps, with clipping: half of what overlap="auto" bears


@dataclass(frozen=True)
class Terms:
    """What decides, beside the room."""

    overlap: str  # "hold", "speculate" or "auto", as asked for
    one_side: bool
    shared: bool  # the model computes on the processors
    clips: bool
    read_bytes_per_s: float | None = None  # of the drives; None: not known

    @property
    def redone(self) -> float:
        """The share of steps whose updates run again; without clipping only late changes do it."""
        return REDONE_SHARE if self.clips else 0.0

    @property
    def gains_nothing(self) -> bool:
        """True where what runs ahead hides no transfer and takes what computes."""
        return self.one_side and self.shared and self.overlap == "auto"

    def copy_s(self, num_bytes: int) -> float:
        """Seconds a step that copies take."""
        return 2 * num_bytes / COPY_BYTES_PER_S

    def read_s(self, num_bytes: int) -> float:
        """Seconds a step that reading again takes, on average."""
        return self.redone * num_bytes / (self.read_bytes_per_s or READ_BYTES_PER_S)


@dataclass(frozen=True)
class Undo:
    """The choice, by unit.  Those in none of the sets do not stay: their committed side is read."""

    overlap: str = "hold"  # as asked for, or "hold" where no update can be taken back
    copied: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    num_bytes: int = 0  # of the copies, HOST
    staying_bytes: int = 0  # of weights and state that updates ahead of step() change in memory
    terms: Terms | None = None  # None: nothing was to run ahead

    def lines(self) -> Iterator[str]:
        """For the printed plan; nothing where nothing that stays was to run ahead."""
        terms = self.terms
        if terms is None or not self.staying_bytes:
            return
        ways = ("work on copies", self.copied), ("are read again", self.read), ("wait", self.held)
        told = ", ".join(f"{len(units)} {way}" for way, units in ways if units)
        why = (
            f"{terms.copy_s(self.staying_bytes):.4f} s a step by copies of all,"
            f" {terms.read_s(self.staying_bytes):.4f} s by reading again where"
            f" {terms.redone:.1%} of steps are redone"
        )
        if terms.one_side:
            why = "one side is no generation to go back to"
            why += ", and here updates ahead of step() gain nothing" if terms.gains_nothing else ""
        yield f"undo    of units that stay {told}: {why}"


HELD = Undo()  # nothing runs ahead


def choose_undo(
    units: Sequence[Unit], stays: Sequence[Candidate], unwritten: Collection[tuple[int, Role]], *,
    room: int, terms: Terms,
) -> Undo:  # fmt: skip
    """Choose for `units`, in forward order.

    `stays`: buffers in memory, `unwritten` those that steps do not write; `room`: HOST bytes left.
    """
    if terms.overlap == "hold":
        return HELD
    sizes = in_memory(units, stays)
    trained = {unit.index for unit in units if unit.trainable_elems}
    wanted = _wanted(units, sizes, unwritten, terms)
    copied: set[int] = set()
    for position in spread_order(len(units)):
        index = units[position].index
        if index in wanted and sizes[index] <= room:
            copied.add(index)
            room -= sizes[index]
    overlap = "hold" if terms.one_side and not copied else terms.overlap
    others = trained - copied
    return Undo(
        overlap, frozenset(copied),
        read=frozenset() if terms.one_side else frozenset(sizes.keys() - copied),
        held=frozenset(others) if terms.one_side else frozenset(),
        num_bytes=sum(sizes[index] for index in copied), staying_bytes=sum(sizes.values()),
        terms=terms,
    )  # fmt: skip


def in_memory(units: Sequence[Unit], stays: Sequence[Candidate]) -> dict[int, int]:
    """Bytes in memory of each unit that is updated there."""
    sizes = {unit.index: 0 for unit in units if unit.trainable_elems}
    for each in stays:
        if each.unit in sizes:
            sizes[each.unit] += each.num_bytes
    return {index: size for index, size in sizes.items() if size}


def _wanted(
    units: Sequence[Unit], sizes: dict[int, int], unwritten: Collection[tuple[int, Role]],
    terms: Terms,
) -> set[int]:  # fmt: skip
    """The units whose copies are the cheapest way."""
    if not terms.one_side:
        total = sum(sizes.values())
        return set(sizes) if terms.copy_s(total) < terms.read_s(total) else set()
    if terms.gains_nothing:
        return set()
    return {
        unit.index
        for unit in units
        if unit.index in sizes
        and all((unit.index, role) in unwritten for role in unit.roles if unit.role_bytes(role))
    }
