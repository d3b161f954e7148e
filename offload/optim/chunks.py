"""From a unit's layout and the places of its roles to the arrays that the pipeline takes.

    template = UnitTemplate.of(unit, chunk_elems=..., streams=...)         once per (unit, side)
    chunks, segments = template.fill(unit_index=..., deadline=..., rows=...)   each step
    all_chunks, all_segments = stack([...])                                one job

Only the trainable section is cut: frozen tensors are not part of an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from _offload_native import lib
from numpy.typing import NDArray

import aio
from offload.kernels import tensor_key
from offload.optim.pipeline import (
    AFTER_RELEASE,
    CHUNK,
    SEGMENT,
    UPDATE_COPY,
    UPDATE_ROLES,
    file_address,
)
from offload.partition.chunk import state_borders
from offload.partition.states import SCALE_BYTES, SCALES, STATES, Role
from offload.partition.unit import Unit

GRAD_FORMATS = {
    "float32": (4, int(lib.SIMD_F32)),
    "bfloat16": (2, int(lib.SIMD_BF16)),
    "float16": (2, int(lib.SIMD_F16)),
}


STATE_FORMATS = {
    "float32": int(lib.SIMD_F32), "bfloat16": int(lib.SIMD_BF16), "int8": int(lib.SIMD_I8),
    "uint8": int(lib.SIMD_U8),
}  # fmt: skip
WEIGHT_FORMATS = {"bfloat16": int(lib.SIMD_BF16), "float16": int(lib.SIMD_F16)}


@dataclass(frozen=True)
class StreamPlace:
    """Where one role of a unit comes from and goes to.

    A chunk with a host address is updated there, in place, and written from there; without one in a
    slot.  With a source address it is copied from there first, else read where it is in a slot;
    without any it starts as zeros.  Host memory holds each chunk's bytes rounded up to 4096, and
    may be filled until the unit's release.
    """

    # Of the flat buffer; or (num_chunks,), one address per chunk, 0: none.
    host_address: int | NDArray[np.uint64] | None = None
    read: tuple[aio.File, int] | None = None  # file, byte offset of the flat buffer
    write: tuple[aio.File, int] | None = None
    elem_bytes: int = 0  # of the gradient; 0: what the unit's table says
    format: int = 0  # enum simd_format, of the gradient
    source_address: int | None = None  # of memory that is left as it is
    after_release: bool = False  # the file is read then, not before: it is still being written

    @classmethod
    def grad(
        cls,
        dtype: str,  # "float32", "bfloat16", "float16"
        *,
        host_address: int | NDArray[np.uint64] | None = None,
        read: tuple[aio.File, int] | None = None,
        after_release: bool = False,
    ) -> StreamPlace:
        """The place of gradients of type `dtype`."""
        elem_bytes, code = GRAD_FORMATS[dtype]
        return cls(host_address, read, None, elem_bytes, code, after_release=after_release)


@dataclass(frozen=True)
class UnitTemplate:
    """Everything about a unit's chunks that does not change from step to step."""

    chunks: NDArray[np.void]  # (num_chunks,) CHUNK
    segments: NDArray[np.void]  # (num_segments,) SEGMENT
    tensor_of_segment: NDArray[np.int64]  # (num_segments,) into names
    names: tuple[str, ...]
    files: tuple[aio.File, ...]  # named by address in `chunks`: keep them alive

    @classmethod
    def of(
        cls, unit: Unit, *, chunk_elems: int, streams: Mapping[Role, StreamPlace]
    ) -> UnitTemplate:
        """Cut `unit` (see `state_borders`) into chunks of at most `chunk_elems`."""
        borders = np.array(state_borders(unit, chunk_elems), np.int64)
        starts = borders[:-1]
        chunks = np.zeros(len(starts), CHUNK)
        chunks["num_elems"] = np.diff(borders)
        for index, role in enumerate(UPDATE_ROLES):
            if role in streams:
                _fill_stream(chunks["streams"][:, index], unit, starts, role, streams[role])
        segments, tensors = _cut(unit, borders)
        chunk_of_segment = np.searchsorted(starts, segments["start"], side="right") - 1
        chunks["num_segments"] = np.bincount(chunk_of_segment, minlength=len(chunks))
        chunks["first_segment"] = np.cumsum(chunks["num_segments"]) - chunks["num_segments"]
        names = tuple(slot.tensor.name for slot in unit.slots)
        keys = np.array([tensor_key(name) for name in names], np.uint64)
        files = [file for place in streams.values() for file, _ in _files(place)]
        return cls(
            chunks,
            _relative(segments, starts[chunk_of_segment], keys[tensors]),
            tensors,
            names,
            tuple(files),
        )

    def fill(
        self, *, unit_index: int, deadline: int, rows: Mapping[str, int | None]
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Set this step's deadline and rows in copies; without a row, a tensor is copied (N4)."""
        chunks, segments = self.chunks.copy(), self.segments.copy()
        chunks["unit"] = unit_index
        chunks["deadline"] = deadline
        table = [rows.get(name) for name in self.names]
        row_of = np.array([UPDATE_COPY if row is None else row for row in table], np.uint32)
        segments["row"] = row_of[self.tensor_of_segment]
        return chunks, segments


def build_unit_chunks(
    unit: Unit,
    *,
    unit_index: int,
    chunk_elems: int,
    deadline: int,
    streams: Mapping[Role, StreamPlace],
    rows: Mapping[str, int | None],
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Chunks and segments of one unit, for a single use: a template filled once."""
    template = UnitTemplate.of(unit, chunk_elems=chunk_elems, streams=streams)
    return template.fill(unit_index=unit_index, deadline=deadline, rows=rows)


def stack(
    parts: Sequence[tuple[NDArray[np.void], NDArray[np.void]]],
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Join the arrays of several units into those of one job."""
    if not parts:
        return np.zeros(0, CHUNK), np.zeros(0, SEGMENT)
    chunks = np.concatenate([part[0] for part in parts])
    before = np.cumsum([0] + [len(part[1]) for part in parts[:-1]])
    chunks["first_segment"] += np.repeat(before, [len(part[0]) for part in parts]).astype(np.uint32)
    return chunks, np.concatenate([part[1] for part in parts])


def _files(place: StreamPlace) -> list[tuple[aio.File, int]]:
    return [pair for pair in (place.read, place.write) if pair is not None]


def _fill_stream(
    stream: NDArray[np.void],  # (num_chunks,) STREAM, a view
    unit: Unit,
    starts: NDArray[np.int64],  # (num_chunks,) elements
    role: Role,
    place: StreamPlace,
) -> None:
    offsets = _describe(stream, unit, starts, role, place)
    present = stream["elem_bytes"] > 0
    if isinstance(place.host_address, np.ndarray):
        stream["host"] = np.where(present, place.host_address, 0)
    elif place.host_address:
        stream["host"] = np.where(present, offsets + np.uint64(place.host_address), 0)
    if place.source_address:
        stream["source"] = np.where(present, offsets + np.uint64(place.source_address), 0)
    if place.read is not None:
        file, offset = place.read
        if place.after_release:
            stream["flags"][(stream["host"] == 0) & (stream["source"] == 0)] = AFTER_RELEASE
        stream["read_file"] = np.where(present, file_address(file), 0)
        stream["read_offset"] = np.where(present, offsets + np.uint64(offset), 0)
    if place.write is not None:
        file, offset = place.write
        stream["write_file"] = np.where(present, file_address(file), 0)
        stream["write_offset"] = np.where(present, offsets + np.uint64(offset), 0)


def _describe(
    stream: NDArray[np.void], unit: Unit, starts: NDArray[np.int64], role: Role,
    place: StreamPlace,
) -> NDArray[np.uint64]:  # fmt: skip
    """Set type and size of each chunk's elements; return where it begins in the flat buffer."""
    if place.elem_bytes or role is Role.GRAD:
        stream["elem_bytes"], stream["format"] = place.elem_bytes, place.format
        return (starts * place.elem_bytes).astype(np.uint64)
    packed = starts < unit.packed_elems
    if role in STATES:
        states = unit.states
        sizes = [states.state_bytes(packed=flag) for flag in (True, False)]
        codes = [STATE_FORMATS[states.format(role, packed=flag)] for flag in (True, False)]
        stream["elem_bytes"] = np.where(packed, *sizes)
        stream["format"] = np.where(packed, *codes)
    elif role in SCALES:
        stream["elem_bytes"] = np.where(packed, SCALE_BYTES, 0)
    else:
        weights = unit.states.weights
        stream["elem_bytes"] = weights.elem_bytes(role)
        if role is Role.PARAM and weights.apart:
            stream["format"] = WEIGHT_FORMATS[weights.type_of(role)]
    return np.array([unit.byte_of(role, int(start)) for start in starts], np.uint64)


def _cut(unit: Unit, borders: NDArray[np.int64]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Cut tensors at chunk borders: segments with absolute starts, in order; the tensor of each."""
    starts = np.array([slot.start for slot in unit.slots], np.int64)
    stops = np.array([slot.stop for slot in unit.slots], np.int64)
    trainable = np.array([slot.tensor.trainable for slot in unit.slots], bool) & (stops > starts)
    first = np.searchsorted(borders, starts, side="right") - 1
    last = np.searchsorted(borders, stops, side="left") - 1
    counts = np.where(trainable, last - first + 1, 0)
    tensors = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(tensors)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk = first[tensors] + within
    begin = np.maximum(starts[tensors], borders[chunk])
    absolute = np.zeros(
        len(tensors), [("start", np.int64), ("num_elems", np.int64), ("first", np.int64)]
    )
    absolute["start"] = begin
    absolute["first"] = begin - starts[tensors]
    absolute["num_elems"] = np.minimum(stops[tensors], borders[chunk + 1]) - begin
    return absolute, tensors


def _relative(
    segments: NDArray[np.void], base: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.void]:
    result = np.zeros(len(segments), SEGMENT)
    result["start"] = segments["start"] - base
    result["num_elems"] = segments["num_elems"]
    result["first"] = segments["first"]
    result["key"] = keys
    return result
