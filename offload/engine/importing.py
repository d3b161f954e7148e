"""Make the state that another system saved this engine's next generation.

shares of all ranks --fp32 pieces--> split --> param | master_lo | exp_avg | exp_avg_sq
                                               of each unit's spare side, then one commit
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

import aio
from offload import kernels
from offload.engine import standstill
from offload.engine.connect import Ground, Parts
from offload.engine.rewriting import commit_rewritten
from offload.errors import StateError
from offload.interchange.deepspeed import ZeroCheckpoint
from offload.partition.chunk import Chunk, chunks_of, segments_of
from offload.partition.unit import (
    ELEM_BYTES,
    STATE_ROLES,
    STORE_ALIGN_BYTES,
    Role,
    Slot,
    Unit,
    round_up,
)
from offload.runtime.persistent import DTYPES

_LANES = 2  # chunks in flight


def import_zero(
    parts: Parts, checkpoint: ZeroCheckpoint, names: Mapping[str, list[str]],
    adopt: Callable[[Mapping[str, str]], bytes],
) -> None:  # fmt: skip
    """Write `checkpoint` to the spare sides and commit it as the next generation.

    `names`: every name of a stored parameter, the first included.  `adopt(found)` gets each
    parameter's name in the checkpoint, takes over what is not in the store and returns the payload.
    Raises StateError, with nothing changed, where the models differ.
    """
    ground = parts.ground
    found = _match(checkpoint, ground.blueprint.units, names)
    standstill.stop(parts)
    ground.store.begin()
    sides = {unit.name: ground.store.spare(unit.name) for unit in ground.blueprint.units}
    with contextlib.closing(_Writer(ground)) as writer:
        for unit in ground.blueprint.units:
            for chunk in chunks_of(unit.num_elems, writer.chunk_elems):
                writer.write(unit, chunk, sides[unit.name], _Source(checkpoint, found))
    commit_rewritten(ground.ledger, sides, adopt(found), zero_moments=())
    standstill.refresh(parts)


def _match(
    checkpoint: ZeroCheckpoint, units: tuple[Unit, ...], names: Mapping[str, list[str]]
) -> dict[str, str]:  # fmt: skip
    """Name in the store -> name in the checkpoint."""
    shapes = checkpoint.shapes
    found = {}
    for tensor in (slot.tensor for unit in units for slot in unit.slots):
        name = next((name for name in names[tensor.name] if name in shapes), None)
        if name is None or shapes[name] != tensor.shape:
            got = "none" if name is None else f"one of shape {list(shapes[name])}"
            raise StateError(
                f"{checkpoint.folder}: expected a parameter {tensor.name!r} of shape"
                f" {list(tensor.shape)}, got {got}. Build the model as it was built for DeepSpeed."
            )
        found[tensor.name] = name
    return found


@dataclass(frozen=True)
class _Source:
    """Elements of a stored tensor, read from the checkpoint."""

    checkpoint: ZeroCheckpoint
    names: Mapping[str, str]

    def read(self, slot: Slot, role: Role | None, start: int, out: torch.Tensor) -> None:
        """Fill `out` (n,) fp32 with the master (`role` None) or a moment."""
        name = self.names[slot.tensor.name]
        shares = (
            self.checkpoint.master(name) if role is None else self.checkpoint.moment(name, role)
        )
        if shares is None:
            out.zero_()
        else:
            shares.read(start, out)


class _Writer:
    """Writes chunks of all roles through a few buffers."""

    def __init__(self, ground: Ground) -> None:
        self.chunk_elems = ground.blueprint.placement.chunk_elems
        self._store = ground.store
        self._queue = ground.queue
        self._master = torch.empty(self.chunk_elems, dtype=torch.float32)
        num_bytes = sum(self._role_bytes(role) for role in STATE_ROLES)
        self._buffer = aio.Buffer(_LANES * num_bytes)
        self._free = deque(
            self._buffer.view[i * num_bytes :][:num_bytes] for i in range(_LANES)
        )  # fmt: skip
        self._flying: deque[tuple[memoryview, list[aio.Ticket]]] = deque()

    def write(self, unit: Unit, chunk: Chunk, side: int, source: _Source) -> None:
        """Fill and submit every role of one chunk; padding becomes zero."""
        if not self._free:
            self._retire()
        lane = self._free.popleft()
        tickets = []
        views = dict(self._views(lane))
        tensors = {
            role: torch.frombuffer(view, dtype=DTYPES[role])[: chunk.num_elems]
            for role, view in views.items()
        }
        self._fill(unit, chunk, tensors, source)
        for role, view in views.items():
            num_elems = min(chunk.stop, unit.role_elems(role)) - chunk.start
            if num_elems > 0:
                at = self._store.extent(unit.name, role, side)
                data = view[: round_up(num_elems * ELEM_BYTES[role], STORE_ALIGN_BYTES)]
                offset = at.offset + chunk.start * ELEM_BYTES[role]
                tickets.append(self._queue.write(at.file, data, offset))
        self._flying.append((lane, tickets))

    def close(self) -> None:
        """Wait for what is in flight; raises what went wrong."""
        try:
            while self._flying:
                self._retire()
        finally:
            for _, tickets in self._flying:
                for ticket in tickets:
                    with contextlib.suppress(aio.IOFailed):
                        ticket.wait()

    def _fill(
        self, unit: Unit, chunk: Chunk, tensors: Mapping[Role, torch.Tensor], source: _Source
    ) -> None:  # fmt: skip
        for tensor in tensors.values():
            tensor.zero_()
        for segment in segments_of(unit, chunk):
            stop = segment.chunk_start + segment.num_elems
            pieces = {role: tensor[segment.chunk_start : stop] for role, tensor in tensors.items()}
            master = self._master[: segment.num_elems]
            source.read(segment.slot, None, segment.tensor_start, master)
            kernels.split(master, pieces[Role.PARAM], pieces[Role.MASTER_LO])
            if segment.slot.tensor.trainable:
                for role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
                    source.read(segment.slot, role, segment.tensor_start, pieces[role])

    def _retire(self) -> None:
        lane, tickets = self._flying.popleft()
        self._free.append(lane)
        for ticket in tickets:
            ticket.wait()

    def _role_bytes(self, role: Role) -> int:
        return round_up(self.chunk_elems * ELEM_BYTES[role], STORE_ALIGN_BYTES)

    def _views(self, lane: memoryview) -> Iterator[tuple[Role, memoryview]]:
        start = 0
        for role in STATE_ROLES:
            size = self._role_bytes(role)
            yield role, lane[start : start + size]
            start += size
