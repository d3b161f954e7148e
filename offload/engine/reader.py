"""Host copies of what the store holds: one tensor of one role, or all weights as a `state_dict`.

tensor_of(name, role)   reads the tensor's byte range, wherever the unit is
snapshot()              weights streamed to an unlinked file, one memory map per parameter:
                        no copy in memory, and later steps do not change it
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

import aio
from offload import kernels, masters
from offload.engine.ledger import Ledger
from offload.errors import StoreError
from offload.partition.states import BLOCK_ELEMS, MOMENTS, SCALES, STATES
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Slot, Unit, round_up
from offload.runtime.persistent import PersistentState
from offload.runtime.resident import ResidentBuffers
from offload.store.store import Store

PIECE_ELEMS = 1 << 20
_TYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "uint8": torch.uint8
}  # fmt: skip


class Reader:
    """Reads single tensors out of the current generation."""

    def __init__(
        self, queue: aio.Queue, ledger: Ledger, units: Mapping[int, Unit],
        persistent: PersistentState | None, *, resident: ResidentBuffers,
    ) -> None:  # fmt: skip
        self._resident = resident
        self._queue = queue
        self._ledger = ledger
        self._persistent = persistent
        self._where = {
            slot.tensor.name: (unit, slot) for unit in units.values() for slot in unit.slots
        }

    def find(self, name: str) -> tuple[Unit, Slot]:
        return self._where[name]

    def tensor_of(self, name: str, role: Role) -> torch.Tensor:
        """A HOST copy of the weight or master of one parameter, in its shape."""
        unit, slot = self._where[name]
        return self.role_range(unit, role, slot.start, slot.stop).view(slot.tensor.shape)

    def state_of(self, name: str, role: Role) -> torch.Tensor:
        """A HOST copy of one state of a trainable parameter, in its shape and fp32."""
        unit, slot = self._where[name]
        return self.state_range(unit, role, slot.start, slot.stop).view(slot.tensor.shape)

    def master(self, name: str) -> torch.Tensor:
        """The fp32 master of a parameter, in its shape; of a frozen 16-bit one, its value."""
        unit, slot = self._where[name]
        out = torch.empty(slot.tensor.num_elems, dtype=torch.float32)
        for start in range(0, len(out), PIECE_ELEMS):
            stop = min(start + PIECE_ELEMS, len(out))
            self.master_range(unit, slot.start + start, out[start:stop])
        return out.view(slot.tensor.shape)

    def master_range(self, unit: Unit, start: int, out: torch.Tensor) -> None:
        """Fill `out` (n,) fp32 with the masters of elements [start, start + n) of a unit."""
        stop, weights = start + len(out), unit.states.weights
        kept = [role for role in weights.roles if stop <= unit.role_elems(role)]
        roles = weights.decoded_from(kept)
        pieces = {role: self.role_range(unit, role, start, stop) for role in roles}
        masters.decode(weights, pieces, out)

    def weight_range(self, unit: Unit, start: int, stop: int) -> torch.Tensor:
        """The 16-bit weights of elements [start, stop) of a unit."""
        return self.role_range(unit, Role.PARAM, start, stop)

    def state_range(self, unit: Unit, role: Role, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of one state of a unit, decoded to fp32; of one format.

        Where they are packed, `start` is the first element of a block.
        """
        out = torch.empty(stop - start, dtype=torch.float32)
        packed = unit.is_packed(start)
        name = unit.states.format(role, packed=packed)
        data = self.data_range(unit, role, *(unit.byte_of(role, at) for at in (start, stop)))
        scale = None
        if packed:
            of = SCALES[STATES.index(role)]
            blocks = (start, round_up(stop, BLOCK_ELEMS))
            scale = self.data_range(unit, of, *(unit.byte_of(of, at) for at in blocks))
            scale = scale.view(torch.float32)
        kernels.state_decode(kernels.State(role.value, data.view(_TYPES[name]), scale), out)
        return out

    def role_range(self, unit: Unit, role: Role, start: int, stop: int) -> torch.Tensor:
        """A HOST copy of elements [start, stop) of weights or masters of a unit."""
        self._ledger.write_back.check()
        if self._is_persistent(unit):
            assert self._persistent is not None
            self._ledger.wait(unit.index)
            return self._persistent.tensor(role)[start:stop].clone()  # of frozen tensors too
        first, last = unit.byte_of(role, start), unit.byte_of(role, stop)
        return self.data_range(unit, role, first, last).view(
            masters.dtype_of(unit.states.weights, role)
        )

    def data_range(self, unit: Unit, role: Role, start: int, stop: int) -> torch.Tensor:
        """A HOST copy of bytes [start, stop) of the flat buffer of a role, uint8."""
        self._ledger.write_back.check()
        if self._is_persistent(unit):
            assert self._persistent is not None
            self._ledger.wait(unit.index)
            return self._persistent.data(role)[start:stop].clone()
        if stop <= start or (role in MOMENTS and unit.index in self._ledger.zero_moments):
            return torch.zeros(max(stop - start, 0), dtype=torch.uint8)
        here = self._resident.current(unit.index, role)
        if here is not None:
            self._ledger.wait(unit.index)
            return here.tensor(torch.uint8, stop - start, offset=start).clone()
        at = self._ledger.place(unit.index, role)
        first = start // STORE_ALIGN_BYTES * STORE_ALIGN_BYTES
        last = round_up(stop, STORE_ALIGN_BYTES)
        with aio.Buffer(last - first) as buffer:
            ticket = self._queue.read(
                at.file, buffer.view, at.offset + first, deadline=self._ledger.deadline()
            )
            ticket.wait()
            data = bytearray(buffer.view[start - first : stop - first])
        return torch.frombuffer(data, dtype=torch.uint8)

    def _is_persistent(self, unit: Unit) -> bool:
        return self._persistent is not None and unit is self._persistent.unit


@contextlib.contextmanager
def current(store: Store) -> Iterator[None]:
    """Read in the block from a store that somebody else may be writing.

    Raises StoreError when what was read may have been overwritten meanwhile.
    """
    yield
    if store.read_only and store.committed is not None and not store.generations.is_current():
        raise StoreError(
            f"store {store.folders[0]}: generation {store.committed.generation} is no longer there:"
            " the job that owns it went on while it was read. Open it again, or evaluate a"
            " checkpoint, which stays."
        )


def snapshot(reader: Reader, names: list[str], folder: Path | None) -> dict[str, torch.Tensor]:
    """Full weights by name, as they move, each a private map of an unlinked file in `folder`.

    None: where temporary files go.
    """
    file, path = tempfile.mkstemp(prefix="state_dict-", dir=folder)
    try:
        os.unlink(path)
        places: dict[str, tuple[int, int]] = {}
        offset = 0
        for name in names:
            unit, slot = reader.find(name)
            num_bytes = slot.tensor.num_elems * unit.states.weights.fetched_bytes
            places[name] = (offset, num_bytes)
            offset = round_up(offset + num_bytes, mmap.ALLOCATIONGRANULARITY)
        os.posix_fallocate(file, 0, max(offset, 1))
        for name in names:
            _write(file, places[name][0], reader, name)
        return {name: _map(file, *places[name], *reader.find(name)) for name in names}
    finally:
        os.close(file)


def _write(file: int, offset: int, reader: Reader, name: str) -> None:
    unit, slot = reader.find(name)
    for start in range(slot.start, slot.stop, PIECE_ELEMS):
        stop = min(start + PIECE_ELEMS, slot.stop)
        if unit.states.weights.exact:
            piece = torch.empty(stop - start, dtype=torch.float32)
            reader.master_range(unit, start, piece)
        else:
            piece = reader.weight_range(unit, start, stop)
        data: memoryview = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]
        while data:
            done = os.pwrite(file, data, offset)
            data, offset = data[done:], offset + done


def _map(
    file: int, offset: int, num_bytes: int, unit: Unit, slot: Slot
) -> torch.Tensor:  # fmt: skip
    dtype = masters.moved_dtype(unit.states.weights)
    if not num_bytes:
        return torch.empty(slot.tensor.shape, dtype=dtype)
    memory = mmap.mmap(file, num_bytes, access=mmap.ACCESS_COPY, offset=offset)
    array = np.frombuffer(memory, dtype=np.uint8)
    return torch.from_numpy(array).view(dtype).view(slot.tensor.shape)
