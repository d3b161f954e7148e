"""Weights out of a store, in order and in pieces, with the next reads already under way.

(unit, slot), ...  --cut-->  pieces of 1 Mi elements  --reads, 4 pieces ahead-->  tensor, tensor
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

import aio
from offload import kernels
from offload.partition.unit import ELEM_BYTES, STORE_ALIGN_BYTES, Role, Slot, Unit, round_up
from offload.store.files import Extent

PIECE_ELEMS = 1 << 20
_AHEAD = 4
_HALF_BYTES = 2 * PIECE_ELEMS + 2 * STORE_ALIGN_BYTES  # with what alignment adds at both ends


class Origin(Protocol):
    """Where the current generation of a unit's role lies; may wait for its update."""

    def place(self, unit: Unit, role: Role) -> Extent: ...


@dataclass
class _Piece:
    """Elements [start, stop) of a unit on their way."""

    lane: memoryview
    num_elems: int
    views: list[memoryview]  # exactly the elements: high halves, and low ones where there are any
    tickets: list[aio.Ticket]


class WeightStream:
    """Reads weights as bf16 (the high halves) or float32 (the masters)."""

    def __init__(self, queue: aio.Queue, origin: Origin) -> None:
        self.queue = queue
        self._origin = origin

    def pieces(
        self, tensors: Iterable[tuple[Unit, Slot]], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Yield each tensor's elements in flat pieces of PIECE_ELEMS, the last one shorter.

        A piece is valid until the next one is asked for.
        """
        with aio.Buffer(_AHEAD * 2 * _HALF_BYTES) as buffer:
            lanes = deque(
                buffer.view[i * 2 * _HALF_BYTES :][: 2 * _HALF_BYTES] for i in range(_AHEAD)
            )
            out = torch.empty(PIECE_ELEMS, dtype=torch.float32)
            flying: deque[_Piece] = deque()
            try:
                for unit, start, stop in _cut(tensors):
                    if not lanes:
                        yield _finish(flying[0], dtype, out)
                        lanes.append(flying.popleft().lane)
                    flying.append(self._submit(unit, (start, stop), dtype, lanes.popleft()))
                while flying:
                    yield _finish(flying[0], dtype, out)
                    flying.popleft()
            finally:
                _abandon(flying)

    def _submit(
        self, unit: Unit, elems: tuple[int, int], dtype: torch.dtype, lane: memoryview
    ) -> _Piece:  # fmt: skip
        start, stop = elems
        views, tickets = [], []
        roles = [Role.PARAM]
        # Low halves of frozen tensors are kept only where whole weights move; else they are zero.
        if dtype is torch.float32 and stop <= unit.role_elems(Role.MASTER_LO):
            roles.append(Role.MASTER_LO)
        for half, role in enumerate(roles):
            size = ELEM_BYTES[role]
            first = start * size // STORE_ALIGN_BYTES * STORE_ALIGN_BYTES
            last = round_up(stop * size, STORE_ALIGN_BYTES)
            target = lane[half * _HALF_BYTES :][: last - first]
            at = self._origin.place(unit, role)
            tickets.append(self.queue.read(at.file, target, at.offset + first))
            views.append(target[start * size - first : stop * size - first])
        return _Piece(lane, stop - start, views, tickets)


def _cut(tensors: Iterable[tuple[Unit, Slot]]) -> Iterator[tuple[Unit, int, int]]:
    for unit, slot in tensors:
        for start in range(slot.start, slot.stop, PIECE_ELEMS):
            yield unit, start, min(start + PIECE_ELEMS, slot.stop)


def _finish(piece: _Piece, dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
    for ticket in piece.tickets:
        ticket.wait()
    hi = torch.frombuffer(piece.views[0], dtype=torch.bfloat16)
    if dtype is torch.bfloat16:
        return hi
    target = out[: piece.num_elems]
    if len(piece.views) > 1:
        kernels.join(hi, torch.frombuffer(piece.views[1], dtype=torch.int16), target)
    else:
        kernels.convert(hi, target)
    return target


def _abandon(flying: Iterable[_Piece]) -> None:
    """Wait until no transfer touches the buffer; what went wrong was told where it mattered."""
    for piece in flying:
        for ticket in piece.tickets:
            ticket.cancel()
            with contextlib.suppress(aio.IOFailed):
                ticket.wait()
