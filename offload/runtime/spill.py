"""Kept gradients that the host budget cannot hold, on their way to scratch files and back.

    edit(unit, chunk) -> slot    what the chunk holds already is read back first
    put(unit, chunk, slot)       the write begins; the slot is free again when it has ended

Slots are few: taking one waits for the oldest write, which always ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import aio
from offload.memory.slab import Region, Slots
from offload.metrics import Metrics
from offload.partition.chunk import Chunk
from offload.partition.unit import STORE_ALIGN_BYTES, Unit, round_up


@dataclass
class SpillFile:
    """One unit's scratch file and the chunks that hold something of this step."""

    unit: Unit
    file: aio.File
    dtype: torch.dtype  # bf16, or float32 for sums
    written: set[int] = field(default_factory=set)


@dataclass
class _Write:
    spill: SpillFile
    chunk: int
    slot: Region
    ticket: aio.Ticket


class Spiller:
    """Owns the spill slots.  Called by one thread at a time."""

    def __init__(
        self, queue: aio.Queue, slots: Slots, *, chunk_elems: int,
        deadline: Callable[[], int], metrics: Metrics,
    ) -> None:  # fmt: skip
        self.chunk_elems = chunk_elems
        self._queue = queue
        self._slots = slots
        self._deadline = deadline
        self._metrics = metrics
        self._writes: deque[_Write] = deque()  # oldest first

    def edit(self, spill: SpillFile, chunk: Chunk) -> Region:
        """Lease a slot with what `chunk` holds already in this step."""
        while any(write.spill is spill and write.chunk == chunk.index for write in self._writes):
            self._retire()  # its bytes must be on disk before they are read back
        while (slot := self._slots.lease()) is None:
            self._retire()
        if chunk.index in spill.written:
            view, offset = _transfer(spill, chunk, slot)
            ticket = self._queue.read(spill.file, view, offset, deadline=self._deadline())
            with self._metrics.stall("spill", spill.unit.name):
                ticket.wait()
            self._metrics.read_bytes["backward.grad"] += len(view)
        return slot

    def put(self, spill: SpillFile, chunk: Chunk, slot: Region) -> None:
        """Write a leased slot back; returns at once."""
        view, offset = _transfer(spill, chunk, slot)
        ticket = self._queue.write(spill.file, view, offset, deadline=self._deadline())
        self._metrics.write_bytes["backward.grad"] += len(view)
        spill.written.add(chunk.index)
        self._writes.append(_Write(spill, chunk.index, slot, ticket))

    def read(self, spill: SpillFile, start: int, stop: int) -> torch.Tensor:
        """A HOST copy of elements [start, stop) of the unit's kept gradients."""
        self.settle()
        size = spill.dtype.itemsize
        first = start * size // STORE_ALIGN_BYTES * STORE_ALIGN_BYTES
        last = round_up(stop * size, STORE_ALIGN_BYTES)
        if first == last:
            return torch.empty(0, dtype=spill.dtype)
        with aio.Buffer(last - first) as buffer:
            self._queue.read(spill.file, buffer.view, first, deadline=self._deadline()).wait()
            data = bytearray(buffer.view[start * size - first : stop * size - first])
        return torch.frombuffer(data, dtype=spill.dtype)

    def settled(self, spill: SpillFile) -> bool:
        """True when every write of this unit has ended; never waits."""
        return all(write.ticket.done() for write in self._writes if write.spill is spill)

    def settle(self) -> None:
        """Wait until every write has ended; raises what went wrong."""
        while self._writes:
            self._retire()

    def close(self) -> None:
        """Wait for what is in flight, whatever its outcome."""
        while self._writes:
            with contextlib.suppress(aio.IOFailed):
                self._retire()

    def _retire(self) -> None:
        write = self._writes.popleft()
        try:
            with self._metrics.stall("spill", write.spill.unit.name):
                write.ticket.wait()
        finally:
            self._slots.give_back(write.slot)


def _transfer(spill: SpillFile, chunk: Chunk, slot: Region) -> tuple[memoryview, int]:
    size = spill.dtype.itemsize
    num_bytes = round_up(chunk.num_elems * size, STORE_ALIGN_BYTES)
    return slot.part(0, num_bytes).view, chunk.start * size
