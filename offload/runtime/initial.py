"""Write a model's initial weights into the store, unit by unit, through leased slots.

    parameter (any dtype)  --fp32 piece--> split --> hi | lo in two slots --> their extents

Nothing is held but one piece per slot pair, whatever the size of the tensor.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

import aio
from offload import kernels
from offload.memory.slab import Region, Slots
from offload.partition.chunk import Chunk, chunks_of, segments_of
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up
from offload.runtime.source import InitialValues
from offload.store.checksum import BlockSums


class Place(Protocol):
    @property
    def file(self) -> aio.File: ...
    @property
    def offset(self) -> int: ...


def split_chunk(
    unit: Unit, chunk: Chunk,
    segments: Iterator[torch.Tensor],  # (n,) each, of the chunk's segments and perhaps more
    hi: torch.Tensor,  # (>= chunk.num_elems,) bf16, HOST
    lo: torch.Tensor,  # (>= chunk.num_elems,) int16, HOST
) -> None:  # fmt: skip
    """Fill `hi` and `lo` with the master halves of a chunk; padding becomes zero."""
    done = 0
    for segment in segments_of(unit, chunk):
        stop = segment.chunk_start + segment.num_elems
        for half in (hi, lo):
            half[done : segment.chunk_start].zero_()
        _split(next(segments), hi[segment.chunk_start : stop], lo[segment.chunk_start : stop])
        done = stop
    for half in (hi, lo):
        half[done:].zero_()


def _split(elems: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    assert len(elems) == len(hi)
    if elems.dtype is torch.bfloat16 and elems.device.type == "cpu":
        # The master is these bits and sixteen zeros.  Not by torch: its threads wait for one
        # another, at times for seconds where the drive's work takes the processors.
        hi.view(torch.int16).numpy()[:] = elems.view(torch.int16).numpy()
        lo.numpy()[:] = 0
    else:
        kernels.split(elems.to(device="cpu", dtype=torch.float32).contiguous(), hi, lo)


class InitialWriter:
    """Streams units to their extents; two slots a chunk."""

    def __init__(
        self, queue: aio.Queue, slots: Slots, values: InitialValues, *, chunk_elems: int,
        sides: Callable[[Unit], Iterable[int]], place: Callable[[Unit, Role, int], Place],
    ) -> None:  # fmt: skip
        """`sides`: those that a unit is written to; frozen tensors need every side."""
        self._queue = queue
        self._slots = slots
        self._values = values
        self._chunk_elems = chunk_elems
        self._sides = sides
        self._place = place
        self._flying: deque[tuple[list[Region], list[aio.Ticket]]] = deque()

    def write(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, dict[Role, bytes]]]:
        """Write both halves of `units`; yield each with its checksums.

        All is written when the iterator has ended.
        """
        units = list(units)
        with contextlib.closing(self._values.segments(units)) as segments:
            for unit in units:
                sums = {Role.PARAM: BlockSums(), Role.MASTER_LO: BlockSums()}
                for chunk in chunks_of(unit.num_elems, self._chunk_elems):
                    self._write(unit, chunk, segments, sums)
                yield unit, {role: found.finish() for role, found in sums.items()}
        while self._flying:
            self._retire()

    def _write(
        self, unit: Unit, chunk: Chunk, segments: Iterator[torch.Tensor],
        sums: dict[Role, BlockSums],
    ) -> None:  # fmt: skip
        slots = self._lease_two()
        hi = slots[0].tensor(torch.bfloat16, self._chunk_elems)
        lo = slots[1].tensor(torch.int16, self._chunk_elems)
        split_chunk(unit, chunk, segments, hi, lo)
        tickets = []
        for role, slot in ((Role.PARAM, slots[0]), (Role.MASTER_LO, slots[1])):
            num_elems = min(unit.role_elems(role) - chunk.start, chunk.num_elems)
            if num_elems <= 0:
                continue
            view = slot.part(0, round_up(2 * num_elems, STORE_ALIGN_BYTES)).view
            for side in self._sides(unit):
                at = self._place(unit, role, side)
                tickets.append(self._queue.write(at.file, view, at.offset + 2 * chunk.start))
            sums[role].add(view[: 2 * num_elems])  # while the drive writes
        self._flying.append((slots, tickets))

    def _lease_two(self) -> list[Region]:
        while self._slots.num_free < 2:
            self._retire()
        pair = [self._slots.lease(), self._slots.lease()]
        return [slot for slot in pair if slot is not None]

    def _retire(self) -> None:
        slots, tickets = self._flying.popleft()
        try:
            for ticket in tickets:
                ticket.wait()
        finally:
            for slot in slots:
                self._slots.give_back(slot)
