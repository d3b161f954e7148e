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
from offload import masters
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Slot, Unit, round_up
from offload.store.files import Extent

PIECE_ELEMS = 1 << 20
_AHEAD = 4
_LANE_BYTES = 4 * PIECE_ELEMS + 4 * STORE_ALIGN_BYTES  # with what alignment adds at all ends


class Origin(Protocol):
    """Where the current generation of a unit's role lies; may wait for its update."""

    def place(self, unit: Unit, role: Role) -> Extent: ...


@dataclass
class _Piece:
    """Elements [start, stop) of a unit on their way."""

    lane: memoryview
    num_elems: int
    unit: Unit
    dtype: torch.dtype  # asked for
    views: dict[Role, memoryview]  # exactly the elements
    tickets: list[aio.Ticket]


class WeightStream:
    """Reads weights as they are, where that is the type asked for, else the masters, rounded."""

    def __init__(self, queue: aio.Queue, origin: Origin) -> None:
        self.queue = queue
        self._origin = origin

    def pieces(self, tensors: Iterable[tuple[Unit, Slot, torch.dtype]]) -> Iterator[torch.Tensor]:
        """Yield each tensor's elements, as the type asked for, in flat pieces of PIECE_ELEMS.

        A piece is valid until the next one is asked for.
        """
        with aio.Buffer(_AHEAD * _LANE_BYTES) as buffer:
            lanes = deque(buffer.view[i * _LANE_BYTES :][:_LANE_BYTES] for i in range(_AHEAD))
            out = torch.empty(PIECE_ELEMS, dtype=torch.float32)
            flying: deque[_Piece] = deque()
            try:
                for unit, elems, dtype in _cut(tensors):
                    if not lanes:
                        yield _finish(flying[0], out)
                        lanes.append(flying.popleft().lane)
                    flying.append(self._submit(unit, elems, dtype, lanes.popleft()))
                while flying:
                    yield _finish(flying[0], out)
                    flying.popleft()
            finally:
                _abandon(flying)

    def _submit(
        self, unit: Unit, elems: tuple[int, int], dtype: torch.dtype, lane: memoryview
    ) -> _Piece:  # fmt: skip
        start, stop = elems
        views, tickets = {}, []
        weights, used = unit.states.weights, 0
        roles: tuple[Role, ...] = (Role.PARAM,)
        if dtype is not masters.dtype_of(weights, Role.PARAM):
            # Frozen tensors have a master only where whole weights move; else it is the weight.
            kept = [role for role in weights.roles if stop <= unit.role_elems(role)]
            roles = weights.decoded_from(kept)
        for role in roles:
            size = weights.elem_bytes(role)
            first = start * size // STORE_ALIGN_BYTES * STORE_ALIGN_BYTES
            last = round_up(stop * size, STORE_ALIGN_BYTES)
            target = lane[used:][: last - first]
            at = self._origin.place(unit, role)
            tickets.append(self.queue.read(at.file, target, at.offset + first))
            views[role] = target[start * size - first : stop * size - first]
            used += last - first
        return _Piece(lane, stop - start, unit, dtype, views, tickets)


def _cut(
    tensors: Iterable[tuple[Unit, Slot, torch.dtype]],
) -> Iterator[tuple[Unit, tuple[int, int], torch.dtype]]:
    for unit, slot, dtype in tensors:
        for start in range(slot.start, slot.stop, PIECE_ELEMS):
            yield unit, (start, min(start + PIECE_ELEMS, slot.stop)), dtype


def _finish(piece: _Piece, out: torch.Tensor) -> torch.Tensor:
    for ticket in piece.tickets:
        ticket.wait()
    weights = piece.unit.states.weights
    pieces = {
        role: torch.frombuffer(view, dtype=masters.dtype_of(weights, role))
        for role, view in piece.views.items()
    }
    if piece.dtype is masters.dtype_of(weights, Role.PARAM):
        return pieces[Role.PARAM]
    target = out[: piece.num_elems]
    masters.decode(weights, pieces, target)
    if piece.dtype is torch.float32:
        return target
    return masters.rounded(target, piece.dtype)


def _abandon(flying: Iterable[_Piece]) -> None:
    """Wait until no transfer touches the buffer; what went wrong was told where it mattered."""
    for piece in flying:
        for ticket in piece.tickets:
            ticket.cancel()
            with contextlib.suppress(aio.IOFailed):
                ticket.wait()
