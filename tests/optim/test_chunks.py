from __future__ import annotations

import numpy as np
from _offload_native import ffi
from hypothesis import given
from hypothesis import strategies as st

from offload.kernels import tensor_key
from offload.optim.chunks import StreamPlace, UnitTemplate, build_unit_chunks, stack
from offload.optim.pipeline import UPDATE_COPY, UPDATE_ROLES
from offload.partition.chunk import chunks_of, segments_of
from offload.partition.unit import ELEM_BYTES, STATE_ROLES, Role, TensorSpec, Unit, lay_out

IN_MEMORY = {role: StreamPlace(host_address=4096, elem_bytes=4) for role in UPDATE_ROLES}


class FakeFile:
    """Only its address is used."""

    def __init__(self) -> None:
        self.native = ffi.new("aio_file *")


def address(file: FakeFile) -> int:
    return int(ffi.cast("uintptr_t", file.native))


@st.composite
def units(draw) -> Unit:
    sizes = draw(st.lists(st.tuples(st.integers(0, 9000), st.booleans()), max_size=8))
    specs = [TensorSpec(f"t{i}", (size,), trainable) for i, (size, trainable) in enumerate(sizes)]
    return lay_out("unit", 0, specs)


@given(units(), st.sampled_from([2048, 4096, 8192]))
def test_chunks_and_segments_are_those_of_the_partition(unit, chunk_elems):
    rows = {slot.tensor.name: index for index, slot in enumerate(unit.slots)}
    chunks, segments = build_unit_chunks(
        unit, unit_index=3, chunk_elems=chunk_elems, deadline=9, streams=IN_MEMORY, rows=rows
    )
    expected = list(chunks_of(unit.trainable_elems, chunk_elems))
    assert chunks["num_elems"].tolist() == [chunk.num_elems for chunk in expected]
    assert set(chunks["unit"]) <= {3}
    assert set(chunks["deadline"]) <= {9}
    for chunk, native in zip(expected, chunks, strict=True):
        first = native["first_segment"]
        own = segments[first : first + native["num_segments"]]
        pieces = [
            (
                piece.chunk_start, piece.num_elems, rows[piece.slot.tensor.name], 0,
                tensor_key(piece.slot.tensor.name), piece.tensor_start,
            )
            for piece in segments_of(unit, chunk)
            if piece.slot.tensor.trainable
        ]  # fmt: skip
        assert [tuple(segment) for segment in own.tolist()] == pieces
    assert sum(chunks["num_segments"]) == len(segments)


def test_every_role_of_a_chunk_has_its_place_in_memory_and_in_both_files():
    unit = lay_out("unit", 0, [TensorSpec("w", (5000,))])
    read, write = FakeFile(), FakeFile()
    streams = {
        role: StreamPlace(1 << 20, (read, 4096 * index), (write, 8192 * index))
        for index, role in enumerate(STATE_ROLES)
    }
    streams[Role.GRAD] = StreamPlace.grad("float32", read=(read, 1 << 16))
    template = UnitTemplate.of(unit, chunk_elems=2048, streams=streams)
    assert set(template.files) == {read, write}
    for index, role in enumerate(STATE_ROLES):
        stream = template.chunks["streams"][:, UPDATE_ROLES.index(role)]
        width = ELEM_BYTES[role]
        assert stream["elem_bytes"].tolist() == [width] * 3
        assert stream["host"].tolist() == [(1 << 20) + i * 2048 * width for i in range(3)]
        assert stream["read_file"].tolist() == [address(read)] * 3
        assert stream["read_offset"].tolist() == [4096 * index + i * 2048 * width for i in range(3)]
        assert stream["write_file"].tolist() == [address(write)] * 3
        assert stream["write_offset"].tolist() == [
            8192 * index + i * 2048 * width for i in range(3)
        ]
    grad = template.chunks["streams"][:, -1]
    assert grad["host"].tolist() == [0, 0, 0]
    assert grad["read_offset"].tolist() == [(1 << 16) + i * 2048 * 4 for i in range(3)]
    assert grad["write_file"].tolist() == [0, 0, 0]


def test_a_filled_template_does_not_change_and_can_be_filled_again():
    unit = lay_out("unit", 0, [TensorSpec("a", (3000,)), TensorSpec("b", (100,))])
    template = UnitTemplate.of(unit, chunk_elems=2048, streams=IN_MEMORY)
    _, first = template.fill(unit_index=0, deadline=1, rows={"a": 4, "b": None})
    chunks, second = template.fill(unit_index=2, deadline=5, rows={"b": 1})
    assert first["row"].tolist() == [4, 4, UPDATE_COPY]
    assert second["row"].tolist() == [UPDATE_COPY, UPDATE_COPY, 1]
    assert chunks["deadline"].tolist() == [5, 5]
    assert chunks["unit"].tolist() == [2, 2]


def test_stacked_units_keep_their_own_segments():
    unit = lay_out("unit", 0, [TensorSpec("a", (3000,)), TensorSpec("b", (100,))])
    template = UnitTemplate.of(unit, chunk_elems=2048, streams=IN_MEMORY)
    parts = [
        template.fill(unit_index=i, deadline=i, rows={"a": 2 * i, "b": 2 * i + 1}) for i in range(3)
    ]
    chunks, segments = stack(parts)
    assert len(chunks) == 6
    for chunk in chunks:
        own = segments[chunk["first_segment"] :][: chunk["num_segments"]]
        assert set(own["row"] // 2) == {chunk["unit"]}
    assert [len(array) for array in stack([])] == [0, 0]


def test_frozen_tensors_are_not_part_of_an_update():
    unit = lay_out("unit", 0, [TensorSpec("w", (64,)), TensorSpec("frozen", (9999,), False)])
    chunks, segments = build_unit_chunks(
        unit, unit_index=0, chunk_elems=2048, deadline=0, streams=IN_MEMORY, rows={"w": 0}
    )
    assert chunks["num_elems"].tolist() == [64]
    assert np.array_equal(segments["num_elems"], [64])
