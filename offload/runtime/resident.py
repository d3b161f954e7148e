"""Flat buffers that stay in host memory, and whether they hold the current generation.

    load / reload ------> CURRENT --bet(u): its update runs on them--> AHEAD
                             ^                                           | kept at step()
                             '-------------------------------------------'
                                     forget(u): dropped, or rewritten on disk --> STALE

    with copies           CURRENT --bet(u): its update runs on the copies--> BESIDE
                             ^                kept: they change places, forget(u) |
                             '----------------------------------------------------'

A buffer is read and updated in place; what the update makes is still written to the other side, so
the committed generation is always on disk, and going back means reading it.  With
durability="none" nothing is (engine/write_back.py saves): only updates on copies run ahead.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol

import torch

import aio
from offload.memory.slab import Region
from offload.partition.states import MOMENTS, Role
from offload.runtime.streams import Event


class Extent(Protocol):
    """Where a buffer lies in the store."""

    @property
    def file(self) -> aio.File: ...
    @property
    def offset(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class Source(Protocol):
    """Where the current generation is."""

    def place(self, unit: int, role: Role) -> Extent: ...

    @property
    def zero_moments(self) -> set[int]:
        """Units whose moments were never written."""
        ...


class Holding(enum.Enum):
    """What a unit's resident buffers hold."""

    CURRENT = "the generation that readers see; with a step under way, once its update has ended"
    AHEAD = "an update whose step is not decided"
    BESIDE = "as CURRENT; the copies hold an update whose step is not decided"
    STALE = "nothing of use: read them again"


class ResidentBuffers:
    """Owns the regions of resident buffers.  Called from hooks and step(), one at a time."""

    def __init__(
        self, regions: dict[tuple[int, Role], Region], queue: aio.Queue, source: Source, *,
        copies: dict[tuple[int, Role], Region],
    ) -> None:  # fmt: skip
        """`copies`: other memory, for all buffers of some units; both change as places do."""
        self._regions = regions
        self._copies = copies
        self._turns = dict.fromkeys((unit for unit, _ in copies), False)  # where current is
        self._queue = queue
        self._source = source
        units = {unit for unit, _ in regions}
        self._holding = dict.fromkeys(units, Holding.STALE)
        self._copied: dict[int, Event] = {}  # to the device, by unit

    def weights(self, unit: int, roles: Iterable[Role]) -> list[Region] | None:
        """The current weights of a unit, if all of `roles` are here; waits for nothing."""
        if not self._is_current(unit):
            return None
        found = [self._regions.get((unit, role)) for role in roles]
        return [region for region in found if region is not None] if all(found) else None

    def current(self, unit: int, role: Role) -> Region | None:
        """What readers of a role may look at, once its unit's update has ended; None: the store."""
        return self._regions.get((unit, role)) if self._is_current(unit) else None

    def region(self, unit: int, role: Role) -> Region | None:
        """Where an update of the unit finds `role`; call `reload` first."""
        return self._regions.get((unit, role))

    def copy(self, unit: int, role: Role) -> Region | None:
        """Where an update ahead of step() works instead; None: in place."""
        return self._copies.get((unit, role))

    def turn(self, unit: int) -> bool:
        """Another value: `region` and `copy` of the unit have changed places."""
        return self._turns.get(unit, False)

    def reload(self, units: Iterable[int], *, deadline: int = 0) -> dict[Role, int]:
        """Read what is stale of `units`, and wait; bytes by role."""
        stale = {unit for unit in units if self._holding.get(unit) is Holding.STALE}
        for unit in stale:
            self._settle(unit)
        moved: dict[Role, int] = {}
        tickets = []
        for (unit, role), region in self._regions.items():
            if unit not in stale:
                continue
            if unit in self._source.zero_moments and role in MOMENTS:
                region.tensor(torch.uint8, region.num_bytes).zero_()
                continue
            extent = self._source.place(unit, role)
            memory = region.part(0, extent.num_bytes).view
            tickets.append(self._queue.read(extent.file, memory, extent.offset, deadline=deadline))
            moved[role] = moved.get(role, 0) + extent.num_bytes
        for ticket in tickets:
            ticket.wait()
        for key, copy in self._copies.items():
            if key[0] in stale:  # frozen tensors, which no update carries over
                copy.view[:] = self._regions[key].view
        self._holding.update(dict.fromkeys(stale, Holding.CURRENT))
        return moved

    def bet(self, unit: int) -> None:
        """From now on an undecided update changes the unit's buffers."""
        if unit in self._holding:
            self._settle(unit)
            self._holding[unit] = Holding.BESIDE if unit in self._turns else Holding.AHEAD

    def keep(self, units: Iterable[int]) -> None:
        """The updates of `units` are those of the step: their buffers hold its generation."""
        for unit in units:
            if self._holding.get(unit) is Holding.BESIDE:
                for key in [(unit, role) for role in Role if (unit, role) in self._copies]:
                    self._regions[key], self._copies[key] = self._copies[key], self._regions[key]
                self._turns[unit] = not self._turns[unit]
            if self._holding.get(unit) in (Holding.AHEAD, Holding.BESIDE):
                self._holding[unit] = Holding.CURRENT

    def forget(self, unit: int) -> bool:
        """An update of the unit is dropped: readers see what was before; True: copies save them.

        Else its buffers hold nothing of use, if the update has touched them.
        """
        beside = self._holding.get(unit) is Holding.BESIDE
        if beside:
            self._holding[unit] = Holding.CURRENT
        elif self._holding.get(unit) is Holding.AHEAD:
            self._holding[unit] = Holding.STALE
        return beside

    def rewritten(self, units: Iterable[int]) -> None:
        """The store holds something else of `units` now."""
        for unit in units:
            if unit in self._holding:
                self._holding[unit] = Holding.STALE

    def reads(self, unit: int, copied: Event | None) -> None:
        """A copy reads the unit's buffers until `copied`; None: it has ended."""
        if copied is not None:
            self._copied[unit] = copied

    def settle(self) -> None:
        """Wait until no copy reads a buffer."""
        for unit in list(self._copied):
            self._settle(unit)

    def _settle(self, unit: int) -> None:
        copied = self._copied.pop(unit, None)
        if copied is not None:
            copied.wait()

    def _is_current(self, unit: int) -> bool:
        return self._holding.get(unit) in (Holding.CURRENT, Holding.BESIDE)
