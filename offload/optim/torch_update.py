"""One chunk of an update by a torch class: its memory, and the arithmetic.

element-wise    segment of master, gradient and states --> step --> back, split
whole tensors   the chunk is a unit; states lie packed in the first state stream

slot   [ param | master_lo or master | states ... | grad ]   what is not in host memory, padded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _offload_native import ffi
from numpy.typing import NDArray
from torch import Tensor

import aio
from offload import kernels, masters
from offload.errors import StateError
from offload.optim import torch_step
from offload.optim.chunks import GRAD_FORMATS
from offload.optim.packing import Packing
from offload.optim.pipeline import UPDATE_COPY, UPDATE_ROLES, file_address
from offload.optim.torch_rule import TorchRule
from offload.optim.torch_step import TorchRow
from offload.partition.unit import STORE_ALIGN_BYTES, Role, round_up
from offload.partition.weights import APART, SPLIT, Weights

# A master from here on would give an infinite weight; of bf16: 0x7f7f8000.
_LIMITS = {SPLIT: 3.3961775e38, APART: masters.FP16_LIMIT}
_STATE_ROLES = (Role.EXP_AVG, Role.EXP_AVG_SQ)
_GRAD_DTYPES = {code: getattr(torch, name) for name, (_, code) in GRAD_FORMATS.items()}
Transfer = tuple[Role, aio.File, memoryview, int]  # ..., offset in the file


@dataclass(frozen=True)
class Work:
    """What was submitted."""

    chunks: NDArray[np.void]
    segments: NDArray[np.void]
    rows: tuple[TorchRow, ...]
    files: Mapping[int, aio.File]  # by the address that the chunks have
    unit_names: tuple[str, ...]
    checksums: bool

    @classmethod
    def of(
        cls, chunks: NDArray[np.void], segments: NDArray[np.void], rows: NDArray[Any],
        files: Sequence[aio.File], unit_names: Sequence[str], *, checksums: bool,
    ) -> Work:  # fmt: skip
        decoded = tuple(TorchRow.decode(bytes(row)) for row in rows)
        by_address = {file_address(file): file for file in files}
        return cls(
            chunks.copy(), segments.copy(), decoded, by_address, tuple(unit_names), checksums
        )

    def unit_name(self, chunk: int) -> str:
        return self.unit_names[int(self.chunks["unit"][chunk])]


class ChunkMemory:
    """The memory of one chunk at work: a slot's, or the host's where the state is resident."""

    def __init__(self, work: Work, index: int, slot: memoryview, packing: Packing | None) -> None:
        chunk = work.chunks[index]
        self.unit = int(chunk["unit"])
        self.deadline = int(chunk["deadline"])
        self.num_elems = int(chunk["num_elems"])
        self.packing = packing
        self._work = work
        first = int(chunk["first_segment"])
        self._segments = work.segments[first : first + int(chunk["num_segments"])]
        self._streams = dict(zip(UPDATE_ROLES, chunk["streams"], strict=True))
        self._memory = self._place(slot)

    def reads(self) -> list[Transfer]:
        """What comes from files."""
        return [
            (role, self._work.files[int(stream["read_file"])], memory, int(stream["read_offset"]))
            for role, stream in self._streams.items()
            if stream["read_file"]
            and not stream["host"]
            and not stream["source"]
            and len(memory := self._memory[role])
        ]

    def writes(self) -> list[Transfer]:
        """What goes to files."""
        return [
            (role, self._work.files[int(stream["write_file"])], memory, int(stream["write_offset"]))
            for role, stream in self._streams.items()
            if stream["write_file"] and len(memory := self._memory[role])
        ]

    def fill(self) -> None:
        """Complete what is not read: copies of resident memory, zeros, rounded masters."""
        for role, stream in self._streams.items():
            memory = self._memory[role]
            if stream["source"]:
                memory[:] = _host(int(stream["source"]), len(memory))
            elif not stream["host"] and not stream["read_file"]:
                memory[:] = bytes(len(memory))
        if self.weights.apart:
            kernels.convert(self.tensor(Role.MASTER), self.tensor(Role.PARAM))

    def tensor(self, role: Role) -> Tensor:
        """The role's elements, flat; shares memory."""
        size = self._data_bytes(role)
        dtype = torch.float32
        if role is Role.GRAD:
            dtype = _GRAD_DTYPES[int(self._streams[role]["format"])]
        elif role in self.weights.roles:
            dtype = masters.dtype_of(self.weights, role)
        if not size:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory[role][:size], dtype=dtype)

    @property
    def weights(self) -> Weights:
        """How the chunk's masters are kept."""
        return APART if self._streams[Role.MASTER]["elem_bytes"] else SPLIT

    def data(self, role: Role) -> memoryview:
        """The role's bytes, without padding."""
        return self._memory[role][: self._data_bytes(role)]

    def pieces(self) -> list[tuple[int, int, TorchRow]]:
        """First and last element of each segment that is updated, and its row."""
        return [
            (int(s["start"]), int(s["start"] + s["num_elems"]), self._work.rows[int(s["row"])])
            for s in self._segments
            if s["row"] != UPDATE_COPY
        ]

    def _data_bytes(self, role: Role) -> int:
        if self.packing is not None and role in _STATE_ROLES:
            return 4 * self.packing.num_elems if role is Role.EXP_AVG else 0
        return self.num_elems * int(self._streams[role]["elem_bytes"])

    def _place(self, slot: memoryview) -> dict[Role, memoryview]:
        """Give each role its memory: the host's, or the next of the slot's."""
        found: dict[Role, memoryview] = {}
        start = 0
        for role, stream in self._streams.items():
            size = round_up(self._data_bytes(role), STORE_ALIGN_BYTES)
            if stream["host"]:
                found[role] = _host(int(stream["host"]), size)
                continue
            found[role] = slot[start : start + size]
            start += size
        if start > len(slot):
            raise StateError(
                f"update of unit {self._work.unit_names[self.unit]!r}: expected a chunk of at most"
                f" {len(slot):,} bytes, a slot's, got {start:,}. Raise host_memory."
            )
        return found


def _host(address: int, num_bytes: int) -> memoryview:
    """Memory that the submitter keeps alive until the job ends."""
    return memoryview(ffi.buffer(ffi.cast("char *", address), num_bytes))


def update_chunk(rule: TorchRule, chunk: ChunkMemory) -> tuple[int, int]:
    """Update a chunk that is read; return its updated elements, and segments that overflowed."""
    chunk.fill()
    num_elems = num_nonfinite = 0
    for start, stop, row in chunk.pieces():
        num_elems += stop - start
        num_nonfinite += _update_piece(rule, chunk, start, stop, row)
    return num_elems, num_nonfinite


def _update_piece(
    rule: TorchRule, chunk: ChunkMemory, start: int, stop: int, row: TorchRow
) -> bool:
    weights = chunk.weights
    pieces = {role: chunk.tensor(role)[start:stop] for role in weights.roles}
    master, grad = torch.empty(stop - start), torch.empty(stop - start)
    masters.decode(weights, pieces, master)
    kernels.convert(chunk.tensor(Role.GRAD)[start:stop], grad)
    if row.grad_scale != 1.0:
        grad.mul_(row.grad_scale)
    places, shape = _places(rule, chunk, start, stop, row)
    state = None if row.scalars is None else {**places, **torch_step.thaw(row.scalars)}
    after = torch_step.step(
        rule.cls, torch_step.thaw(row.settings), master.view(shape), grad.view(shape), state
    )
    for name, value in torch_step.tensors(after).items():
        _store(rule, places, name, value)
    masters.encode(weights, master, pieces)
    return not bool((master.abs() < _LIMITS[weights]).all())


def _places(
    rule: TorchRule, chunk: ChunkMemory, start: int, stop: int, row: TorchRow
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Where a segment's states lie, and the shape in which the class sees it."""
    if chunk.packing is None:
        streams = zip(rule.states, _STATE_ROLES, strict=False)
        return {name: chunk.tensor(role)[start:stop] for name, role in streams}, (stop - start,)
    stream = chunk.tensor(Role.EXP_AVG)
    pieces = chunk.packing.pieces[row.name]
    places = {name: piece.of(stream) for name, piece in pieces.items()}
    return places, chunk.packing.shapes[row.name]


def _store(rule: TorchRule, places: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    """Put a state where it is kept, unless it is there already."""
    place = places.get(name)
    if place is None or place.shape != value.shape:
        wanted = {key: tuple(tensor.shape) for key, tensor in places.items()}
        raise StateError(
            f"optimizer {rule.name}: expected the states that its trial had, {wanted}, got {name}"
            f" of shape {tuple(value.shape)}. Its states must depend on nothing but the settings"
            " and the shape: take another optimizer."
        )
    if place.data_ptr() != value.data_ptr():
        place.copy_(value)
