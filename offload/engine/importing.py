"""Make the state that another system saved this engine's next generation.

shares of all ranks --fp32 pieces--> param | master_lo or master | states
                                     of each unit's spare side, then one commit
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

import aio
from offload import kernels, masters
from offload.engine import standstill
from offload.engine.connect import Ground, Parts
from offload.engine.rewriting import commit_rewritten
from offload.errors import StateError
from offload.interchange.deepspeed import ZeroCheckpoint
from offload.partition.chunk import Chunk, Segment, chunks_of, segments_of, state_chunks
from offload.partition.states import (
    BLOCK_ELEMS,
    MOMENTS,
    SCALES,
    STATES,
    STORE_ALIGN_BYTES,
    Role,
)
from offload.partition.unit import Slot, Unit, round_up

_LANES = 2  # chunks in flight
_TYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "uint8": torch.uint8
}  # fmt: skip


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
    source = _Source(checkpoint, found)
    with contextlib.closing(_Writer(ground)) as writer:
        for unit in ground.blueprint.units:
            for chunk in chunks_of(unit.num_elems, writer.chunk_elems):
                roles = unit.states.weights.roles
                writer.write(_Places(unit, chunk, roles), sides[unit.name], source)
            for chunk in state_chunks(unit, writer.chunk_elems):
                writer.write(_Places(unit, chunk, MOMENTS), sides[unit.name], source)
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

    def step_count(self, slot: Slot) -> int:
        return self.checkpoint.step_count(self.names[slot.tensor.name])


class _Writer:
    """Writes chunks of all roles through a few buffers."""

    def __init__(self, ground: Ground) -> None:
        self.chunk_elems = ground.blueprint.placement.chunk_elems
        self._store = ground.store
        self._queue = ground.queue
        self._values = torch.empty(self.chunk_elems, dtype=torch.float32)
        num_bytes = ground.blueprint.states.slot_bytes(self.chunk_elems, 0)
        self._buffer = aio.Buffer(_LANES * round_up(num_bytes, STORE_ALIGN_BYTES))
        self._free = deque(
            self._buffer.view[i * num_bytes :][:num_bytes] for i in range(_LANES)
        )  # fmt: skip
        self._flying: deque[tuple[memoryview, list[aio.Ticket]]] = deque()

    def write(self, places: _Places, side: int, source: _Source) -> None:
        """Fill and submit some roles of one chunk; padding becomes zero."""
        if not self._free:
            self._retire()
        lane = self._free.popleft()
        tickets = []
        unit, chunk = places.unit, places.chunk
        places.lie_in(lane)
        self._fill(places, source)
        for role, view in places.views.items():
            at = self._store.extent(unit.name, role, side)
            offset = at.offset + unit.byte_of(role, chunk.start)
            tickets.append(self._queue.write(at.file, view, offset))
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

    def _fill(self, places: _Places, source: _Source) -> None:
        for view in places.views.values():
            torch.frombuffer(view, dtype=torch.uint8).zero_()
        for segment in segments_of(places.unit, places.chunk):
            if Role.PARAM in places.views:
                self._fill_weights(places, segment, source)
            elif segment.slot.tensor.trainable:
                self._fill_states(places, segment, source)

    def _fill_weights(self, places: _Places, segment: Segment, source: _Source) -> None:
        values = self._values[: segment.num_elems]
        stop = segment.chunk_start + segment.num_elems
        source.read(segment.slot, None, segment.tensor_start, values)
        weights = places.unit.states.weights
        pieces = {
            role: torch.empty(len(values), dtype=masters.dtype_of(weights, role))
            for role in weights.roles
        }
        masters.encode(weights, values, pieces)
        for role, piece in pieces.items():
            if stop <= places.num_elems(role):
                places.weights(role)[segment.chunk_start : stop] = piece

    def _fill_states(self, places: _Places, segment: Segment, source: _Source) -> None:
        values = self._values[: segment.num_elems]
        stop = segment.chunk_start + segment.num_elems
        key = kernels.tensor_key(segment.slot.tensor.name)
        for index, role in enumerate(places.unit.states.states):
            source.read(segment.slot, role, segment.tensor_start, values)
            kernels.state_encode(
                values, places.state(role, segment.chunk_start, stop), index=index,
                step=source.step_count(segment.slot),
                origin=kernels.Origin(key, segment.tensor_start),
            )  # fmt: skip

    def _retire(self) -> None:
        lane, tickets = self._flying.popleft()
        self._free.append(lane)
        for ticket in tickets:
            ticket.wait()


class _Places:
    """Some roles of one chunk in a lane, one after the other."""

    def __init__(self, unit: Unit, chunk: Chunk, roles: Sequence[Role]) -> None:
        self.unit = unit
        self.chunk = chunk
        self._roles = [role for role in unit.roles if role in roles]
        self.views: dict[Role, memoryview] = {}

    def num_elems(self, role: Role) -> int:
        """Elements of the chunk that `role` has; frozen tensors are in `param` only."""
        return max(min(self.chunk.stop, self.unit.role_elems(role)) - self.chunk.start, 0)

    def lie_in(self, lane: memoryview) -> None:
        """Take the memory of `lane`."""
        start, first = 0, self.chunk.start
        for role in self._roles:
            stop = first + self.num_elems(role)
            num_bytes = self.unit.byte_of(role, stop) - self.unit.byte_of(role, first)
            if num_bytes:
                size = round_up(num_bytes, STORE_ALIGN_BYTES)
                self.views[role] = lane[start : start + size]
                start += size

    def weights(self, role: Role) -> torch.Tensor:
        """The chunk's elements of the weight's or the master's role."""
        dtype = masters.dtype_of(self.unit.states.weights, role)
        return torch.frombuffer(self.views[role], dtype=dtype)[: self.num_elems(role)]

    def state(self, role: Role, start: int, stop: int) -> kernels.State:
        """Elements [start, stop) of the chunk, in their format."""
        packed = self.unit.is_packed(self.chunk.start)
        dtype = _TYPES[self.unit.states.format(role, packed=packed)]
        data = torch.frombuffer(self.views[role], dtype=dtype)[start:stop]
        if not packed:
            return kernels.State(role.value, data)
        scales = torch.frombuffer(self.views[SCALES[STATES.index(role)]], dtype=torch.float32)
        blocks = slice(start // BLOCK_ELEMS, -(-stop // BLOCK_ELEMS))
        return kernels.State(role.value, data, scales[blocks])
