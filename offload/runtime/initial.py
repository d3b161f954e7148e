"""Write a model's initial weights into the store, unit by unit, through leased slots.

    parameter (any dtype)  --fp32 piece--> split --> hi | lo in two slots --> their extents

Nothing is held but one piece per slot pair, whatever the size of the tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

import aio
from offload import kernels
from offload.memory.slab import Region, Slots
from offload.partition.chunk import Chunk, chunks_of, segments_of
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up
from offload.runtime.pages import will_need
from offload.store.checksum import BlockSums

_AHEAD_ELEMS = 4 << 20  # read ahead where parameters are views of files


class Place(Protocol):
    @property
    def file(self) -> aio.File: ...
    @property
    def offset(self) -> int: ...


def split_chunk(
    unit: Unit, chunk: Chunk, parameters: dict[str, nn.Parameter],
    hi: torch.Tensor,  # (>= chunk.num_elems,) bf16, HOST
    lo: torch.Tensor,  # (>= chunk.num_elems,) int16, HOST
) -> None:  # fmt: skip
    """Fill `hi` and `lo` with the master halves of a chunk; padding becomes zero."""
    done = 0
    for segment in segments_of(unit, chunk):
        source = parameters[segment.slot.tensor.name].detach().reshape(-1)
        piece = source[segment.tensor_start : segment.tensor_start + segment.num_elems]
        stop = segment.chunk_start + segment.num_elems
        for half in (hi, lo):
            half[done : segment.chunk_start].zero_()
        kernels.split(
            piece.to(device="cpu", dtype=torch.float32).contiguous(),
            hi[segment.chunk_start : stop],
            lo[segment.chunk_start : stop],
        )
        done = stop
    for half in (hi, lo):
        half[done:].zero_()


class InitialWriter:
    """Streams units to their extents; two slots a chunk."""

    def __init__(self, queue: aio.Queue, slots: Slots, *, chunk_elems: int) -> None:
        self._queue = queue
        self._slots = slots
        self._chunk_elems = chunk_elems
        self._flying: deque[tuple[list[Region], list[aio.Ticket]]] = deque()

    def write(
        self, unit: Unit, parameters: dict[str, nn.Parameter], sides: Iterable[int],
        place: Callable[[Role, int], Place],
    ) -> dict[Role, bytes]:  # fmt: skip
        """Write both halves of `unit` to `sides`; return their checksums.

        Frozen tensors need every side.
        """
        sums = {Role.PARAM: BlockSums(), Role.MASTER_LO: BlockSums()}
        sides = list(sides)
        for chunk in self._read_ahead(unit, parameters):
            slots = self._lease_two()
            hi = slots[0].tensor(torch.bfloat16, self._chunk_elems)
            lo = slots[1].tensor(torch.int16, self._chunk_elems)
            split_chunk(unit, chunk, parameters, hi, lo)
            tickets = []
            for role, slot in ((Role.PARAM, slots[0]), (Role.MASTER_LO, slots[1])):
                num_elems = min(unit.role_elems(role) - chunk.start, chunk.num_elems)
                if num_elems <= 0:
                    continue
                view = slot.part(0, round_up(2 * num_elems, STORE_ALIGN_BYTES)).view
                sums[role].add(view[: 2 * num_elems])
                for side in sides:
                    at = place(role, side)
                    tickets.append(self._queue.write(at.file, view, at.offset + 2 * chunk.start))
            self._flying.append((slots, tickets))
        return {role: found.finish() for role, found in sums.items()}

    def finish(self) -> None:
        """Wait for everything."""
        while self._flying:
            self._retire()

    def _read_ahead(
        self, unit: Unit, parameters: Mapping[str, nn.Parameter]
    ) -> Iterator[Chunk]:  # fmt: skip
        """The chunks in order, each asked for some time before its turn."""
        waiting: deque[Chunk] = deque()
        for chunk in chunks_of(unit.num_elems, self._chunk_elems):
            for segment in segments_of(unit, chunk):
                source = parameters[segment.slot.tensor.name]
                will_need(source, segment.tensor_start, segment.num_elems)
            waiting.append(chunk)
            if len(waiting) * self._chunk_elems > _AHEAD_ELEMS:
                yield waiting.popleft()
        yield from waiting

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
