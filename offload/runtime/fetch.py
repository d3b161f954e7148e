"""Weights on their way from the store to the device, in chunks through leased slots.

    prefetch(us): slots free? --submit reads--> in flight          leaves a reserve
    fill(u):      for each chunk in order: wait, convert into the device storage, free the slot,
                  submit the next chunk of u                       waits; always makes progress

Demand is served from the reserve, so prefetches of other units can hold every other slot without a
deadlock, and a tensor larger than all slots together simply streams.  One thread at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import aio
from offload.errors import StateError
from offload.masters import dtype_of
from offload.memory.slab import Region, Slots
from offload.metrics import Metrics
from offload.partition.chunk import Chunk, chunks_of
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up
from offload.runtime.binding import BoundUnit
from offload.runtime.device import Device
from offload.runtime.loans import RESERVE, Loans
from offload.runtime.resident import ResidentBuffers
from offload.runtime.streams import Event


class Place(Protocol):
    """An extent of the store."""

    @property
    def file(self) -> aio.File: ...
    @property
    def offset(self) -> int: ...


class Source(Protocol):
    """Where the current weights of a unit are."""

    def ready(self, unit: int) -> bool:
        """True when the unit's last update has been written: reading it needs no wait."""
        ...

    def place(self, unit: int, role: Role) -> Place:
        """The current extent; waits for the unit's update."""
        ...

    def wait(self, unit: int, *, made: bool = False) -> None:
        """Wait for the unit's update; `made`: until memory has what it makes."""
        ...

    def deadline(self) -> int:
        """Urgency of a read that compute waits for now; smaller is more urgent."""
        ...


@dataclass
class _Piece:
    chunk: Chunk
    slot: Region
    tickets: list[aio.Ticket]


@dataclass
class _Leaving:
    """A slot that a copy reads."""

    unit: int
    piece: _Piece
    copied: Event | None  # None: it has ended
    lendable: bool


class _Fetch:
    """One unit's transfer: chunks not yet submitted, and pieces in flight in order."""

    def __init__(self, unit: Unit, chunk_elems: int) -> None:
        self.unit = unit
        self.waiting: Iterator[Chunk] = chunks_of(unit.num_elems, chunk_elems)
        self.next: Chunk | None = next(self.waiting, None)
        self.flying: deque[_Piece] = deque()
        self.begun_ns = 0  # only with a timeline


class Fetcher:
    """Reads units; owns the fetch slots."""

    def __init__(
        self, queue: aio.Queue, slots: Slots, source: Source, device: Device, *,
        resident: ResidentBuffers, chunk_elems: int, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._queue = queue
        self._slots = slots
        self._source = source
        self._device = device
        self._resident = resident
        self._chunk_elems = chunk_elems
        self._metrics = metrics
        self._fetches: dict[int, _Fetch] = {}
        self._leaving: deque[_Leaving] = deque()  # oldest first
        self.loans = Loans(slots)
        self.phase = "forward"  # names the bytes in the metrics

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Submit reads of what is used next, nearest first, as fits beside the reserve.

        Units that are being updated are left out.  Prefetches of others, for a course of things
        that was not taken, give their slots up where these lack one.
        """
        expected = {unit.index for unit in units}
        for unit in units:
            if self._resident.weights(unit.index, unit.states.weights.fetched) is not None:
                continue
            if unit.index in self._fetches or self._source.ready(unit.index):
                fetch = self._fetches.setdefault(unit.index, _Fetch(unit, self._chunk_elems))
                self._pump(fetch, keep=RESERVE, delay=1)
                if fetch.next is not None and self._give_up(but=expected):
                    self._pump(fetch, keep=RESERVE, delay=1)

    def _give_up(self, *, but: set[int]) -> bool:
        """Abandon all prefetches but some; True: that freed a slot."""
        others = [index for index in self._fetches if index not in but]
        dropped = [self._fetches.pop(index) for index in others]
        freed = any(fetch.flying for fetch in dropped)
        for fetch in dropped:
            self._abandon(fetch)
        return freed

    def fill(self, bound: BoundUnit) -> None:
        """Bring a unit's weights into its allocated device storage; waits for the disk."""
        unit = bound.unit
        here = self._resident.weights(unit.index, unit.states.weights.fetched)
        if here is not None:
            self._source.wait(unit.index, made=True)
            self._resident.reads(unit.index, self._convert(bound, here, bound.flat))
            return
        fetch = self._fetches.pop(unit.index, None)
        self._metrics.fetches[unit.name] += 1
        self._metrics.hits += fetch is not None and bool(fetch.flying)
        fetch = fetch or _Fetch(unit, self._chunk_elems)
        try:
            self._pump(fetch, keep=0, delay=0)
            while fetch.flying:
                piece = fetch.flying.popleft()
                self._finish(piece, bound)
                self._pump(fetch, keep=0, delay=0)
                if not fetch.flying and fetch.next is not None:
                    self._retire(wait=True)  # all slots are being copied from
                    self._pump(fetch, keep=0, delay=0)
            if self.loans.open:
                self._retire(wait=True)  # the unit's update is told which slots it may read
            if fetch.next is not None:
                raise StateError(f"fill of unit {unit.name!r}: expected a free slot, got none.")
            if self._metrics.timeline is not None:
                self._metrics.timeline.span(
                    "fetches", f"{unit.name} {self.phase}", fetch.begun_ns, time.perf_counter_ns()
                )
        finally:
            self._abandon(fetch)

    def discard(self) -> None:
        """Give up all prefetches: their weights are about to change.  Waits for copies."""
        self._resident.settle()
        self._retire(wait=True)
        self._give_up(but=set())

    def _pump(self, fetch: _Fetch, *, keep: int, delay: int) -> None:
        if fetch.next is not None and self._slots.num_free <= keep:
            self._retire(wait=False)
            self.loans.collect()
        if not fetch.begun_ns and self._metrics.timeline is not None:
            fetch.begun_ns = time.perf_counter_ns()
        while fetch.next is not None and self._slots.num_free > keep:
            slot = self._slots.lease()
            assert slot is not None
            fetch.flying.append(self._submit(fetch.unit, fetch.next, slot, delay))
            fetch.next = next(fetch.waiting, None)

    def _submit(self, unit: Unit, chunk: Chunk, slot: Region, delay: int) -> _Piece:
        deadline = self._source.deadline() + delay
        tickets = []
        for role, target in self._parts(unit, slot, chunk.num_elems):
            place = self._source.place(unit.index, role)
            num_bytes = target.num_bytes
            offset = place.offset + unit.byte_of(role, chunk.start)
            tickets.append(self._queue.read(place.file, target.view, offset, deadline=deadline))
            self._metrics.read_bytes[f"{self.phase}.{role.value}"] += num_bytes
        return _Piece(chunk, slot, tickets)

    def _parts(self, unit: Unit, slot: Region, num_elems: int) -> Iterator[tuple[Role, Region]]:
        """Where a slot holds each role of `num_elems` elements."""
        start, weights = 0, unit.states.weights
        for role in weights.fetched:
            size = weights.elem_bytes(role)
            yield role, slot.part(start, round_up(size * num_elems, STORE_ALIGN_BYTES))
            start += size * self._chunk_elems

    def _convert(
        self, bound: BoundUnit, regions: Iterable[Region], dst: torch.Tensor
    ) -> Event | None:  # fmt: skip
        weights = bound.unit.states.weights
        pieces = [
            region.tensor(dtype_of(weights, role), len(dst))
            for role, region in zip(weights.fetched, regions, strict=True)
        ]
        with self._metrics.busy("fill"):
            lo = pieces[1] if weights.exact else None
            return self._device.fill(dst, pieces[0], lo, behind=bound.vacant)

    def _finish(self, piece: _Piece, bound: BoundUnit) -> None:
        """Wait for one chunk and convert it; its slot is let go whatever happens."""
        copied, unit = None, bound.unit
        try:
            with self._metrics.stall("weights", unit.name):
                for ticket in piece.tickets:
                    ticket.wait()
            regions = self._parts(unit, piece.slot, piece.chunk.num_elems)
            dst = bound.flat[piece.chunk.start : piece.chunk.stop]
            copied = self._convert(bound, (region for _, region in regions), dst)
        finally:
            _settle(piece)
            lendable = bool(unit.states.weights.lent) and self.loans.open
            self._leaving.append(_Leaving(unit.index, piece, copied, lendable))
            if copied is None:
                self._retire(wait=True)

    def _retire(self, *, wait: bool) -> None:
        """Let go, oldest first, of slots that have been copied from: free, or on loan."""
        while self._leaving:
            oldest = self._leaving[0]
            if oldest.copied is not None and not wait and not oldest.copied.done():
                return
            if oldest.copied is not None:
                oldest.copied.wait()
            self._leaving.popleft()
            if oldest.lendable:
                self.loans.keep(oldest.unit, oldest.piece.chunk.index, oldest.piece.slot)
            else:
                self._slots.give_back(oldest.piece.slot)

    def _abandon(self, fetch: _Fetch) -> None:
        fetch.next = None
        while fetch.flying:
            piece = fetch.flying.popleft()
            for ticket in piece.tickets:
                ticket.cancel()
            _settle(piece)
            self._slots.give_back(piece.slot)


def _settle(piece: _Piece) -> None:
    """Wait until the I/O no longer touches the slot; errors were told where data was needed."""
    for ticket in piece.tickets:
        with contextlib.suppress(aio.IOFailed):
            ticket.wait()
