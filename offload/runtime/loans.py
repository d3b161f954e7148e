"""Weights fetched for backward, lent to the update of their unit: 2 bytes a parameter less to read.

    fill in backward --keep--> kept --lend(u, ended)--> on loan --ended()--> free
                                '------drop(u)-------------------------------> free

At most half of the slots are kept, and none while RESERVE or fewer others are free: a fill that has
given its slot away must find another one, and never waits for an update; nor does a prefetch.
"""

from __future__ import annotations

from collections.abc import Callable

from offload.memory.slab import Region, Slots

RESERVE = 2  # slots that prefetches and loans leave to demand


class Loans:
    """Owns fetch slots between a fill and the end of the update that reads them."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._most = len(slots.all) // 2
        self._kept: dict[int, list[Region]] = {}  # by unit, in chunk order
        self._lent: list[tuple[list[Region], Callable[[], bool]]] = []
        self.open = False  # keep slots of fills from now on

    @property
    def _num_held(self) -> int:
        lists = [*self._kept.values(), *(slots for slots, _ in self._lent)]
        return sum(len(slots) for slots in lists)

    def keep(self, unit: int, chunk: int, slot: Region) -> None:
        """Take over the filled slot of a chunk, or free it; a unit's first chunks are kept."""
        if self.open and self._num_held >= self._most:
            self.collect()
        kept = self._kept.get(unit, [])
        room = self._num_held < self._most and self._slots.num_free > RESERVE
        if self.open and room and len(kept) == chunk:
            self._kept[unit] = [*kept, slot]
        else:
            self._slots.give_back(slot)

    def addresses(self, unit: int) -> list[int]:
        """Addresses of a unit's first chunks, in order; the others were not kept."""
        return [slot.address for slot in self._kept.get(unit, [])]

    def lend(self, unit: int, ended: Callable[[], bool]) -> None:
        """Keep a unit's slots until `ended()`."""
        self._lent.append((self._kept.pop(unit, []), ended))

    def drop(self, unit: int) -> None:
        """Free what was kept of a unit and not lent."""
        for slot in self._kept.pop(unit, []):
            self._slots.give_back(slot)

    def collect(self) -> None:
        """Free what is no longer read; never waits."""
        lent, self._lent = self._lent, []
        for slots, ended in lent:
            if ended():
                for slot in slots:
                    self._slots.give_back(slot)
            else:
                self._lent.append((slots, ended))
