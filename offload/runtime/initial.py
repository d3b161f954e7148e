"""Write a model's initial weights into the store, unit by unit, through leased slots.

    parameter (any dtype)  --piece--> weight | master in a slot --> their extents

Nothing is held but one piece a slot, whatever the size of the tensor.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch

import aio
from offload import masters
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


def encode_chunk(
    unit: Unit, chunk: Chunk,
    segments: Iterator[torch.Tensor],  # (n,) each, of the chunk's segments and perhaps more
    pieces: Mapping[Role, torch.Tensor],  # (>= chunk.num_elems,) each of weights and masters, HOST
) -> None:  # fmt: skip
    """Fill `pieces` with the weights and masters of a chunk; padding becomes zero."""
    done = 0
    for segment in segments_of(unit, chunk):
        start, stop = segment.chunk_start, segment.chunk_start + segment.num_elems
        for piece in pieces.values():
            piece[done:start].zero_()
        parts = {role: piece[start:stop] for role, piece in pieces.items()}
        masters.encode(unit.states.weights, next(segments), parts)
        done = stop
    for piece in pieces.values():
        piece[done:].zero_()


class InitialWriter:
    """Streams units to their extents."""

    def __init__(
        self, queue: aio.Queue, slots: Slots, values: InitialValues, *, chunk_elems: int,
        sides: Callable[[Unit], Iterable[int]], place: Callable[[Unit, Role, int], Place],
    ) -> None:  # fmt: skip
        """`sides`: those that a unit is written to; frozen tensors need every side.

        A slot holds weights and masters of `chunk_elems`.
        """
        self._queue = queue
        self._slots = slots
        self._values = values
        self._chunk_elems = chunk_elems
        self._sides = sides
        self._place = place
        self._flying: deque[tuple[Region, list[aio.Ticket]]] = deque()

    def write(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, dict[Role, bytes]]]:
        """Write weights and masters of `units`; yield each with its checksums.

        All is written when the iterator has ended.
        """
        units = list(units)
        with contextlib.closing(self._values.segments(units)) as segments:
            for unit in units:
                sums = {role: BlockSums() for role in unit.states.weights.roles}
                for chunk in chunks_of(unit.num_elems, self._chunk_elems):
                    self._write(unit, chunk, segments, sums)
                yield unit, {role: found.finish() for role, found in sums.items()}
        while self._flying:
            self._retire()

    def _write(
        self, unit: Unit, chunk: Chunk, segments: Iterator[torch.Tensor],
        sums: dict[Role, BlockSums],
    ) -> None:  # fmt: skip
        slot = self._lease()
        pieces, views = {}, {}
        start, weights = 0, unit.states.weights
        for role in weights.roles:
            size = weights.elem_bytes(role) * self._chunk_elems
            part = slot.part(start, size)
            pieces[role] = part.tensor(masters.dtype_of(weights, role), self._chunk_elems)
            views[role] = part.view
            start += size
        encode_chunk(unit, chunk, segments, pieces)
        tickets = []
        for role, view in views.items():
            stop = min(unit.role_elems(role), chunk.stop)
            num_bytes = unit.byte_of(role, stop) - (first := unit.byte_of(role, chunk.start))
            if num_bytes <= 0:
                continue
            for side in self._sides(unit):
                at = self._place(unit, role, side)
                padded = view[: round_up(num_bytes, STORE_ALIGN_BYTES)]
                tickets.append(self._queue.write(at.file, padded, at.offset + first))
            sums[role].add(view[:num_bytes])  # while the drive writes
        self._flying.append((slot, tickets))

    def _lease(self) -> Region:
        while (slot := self._slots.lease()) is None:
            self._retire()
        return slot

    def _retire(self) -> None:
        slot, tickets = self._flying.popleft()
        try:
            for ticket in tickets:
                ticket.wait()
        finally:
            self._slots.give_back(slot)
