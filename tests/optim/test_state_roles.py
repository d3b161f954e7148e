"""Units whose states are in other formats, or fewer: layout, chunks, the update through files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_unit import ROWS, assert_updated, chunks_of, row_of, submit

from offload import kernels
from offload.errors import ConfigError, StateError
from offload.optim.pipeline import UPDATE_ROLES
from offload.partition.chunk import state_borders, state_chunks
from offload.partition.states import BLOCK_ELEMS, SCALES, STATES, Role, StateTable
from offload.partition.unit import TensorSpec, Unit, lay_out
from offload.partition.weights import APART
from offload.store.extents import UnitExtents

MOMENTS = ("exp_avg", "exp_avg_sq")
TABLES = {dtype: StateTable(MOMENTS, dtype) for dtype in ("fp32", "bf16", "int8")}
C = 262144  # the least chunk of packed states


@st.composite
def units(draw: st.DrawFn) -> Unit:
    table = StateTable(MOMENTS[: draw(st.integers(0, 2))], draw(st.sampled_from(sorted(TABLES))))
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 9000), st.booleans(), st.booleans()), max_size=9)
    )
    specs = [
        TensorSpec(f"t{i}", (n,), trainable, plain) for i, (n, trainable, plain) in enumerate(sizes)
    ]
    return lay_out("unit", 0, specs, states=table)


@given(units())
def test_packed_tensors_begin_with_a_block_and_plain_ones_with_a_page(unit: Unit) -> None:
    for slot in unit.slots:
        packed = unit.states.packs and slot.tensor.trainable and not slot.tensor.plain
        if slot.tensor.num_elems:
            assert unit.is_packed(slot.start) is packed
        assert slot.start % (BLOCK_ELEMS if packed else 64) == 0
        assert (
            slot.tensor.trainable is (slot.start < unit.trainable_elems)
            or not slot.tensor.num_elems
        )
    for one, other in pairwise(unit.slots):
        assert one.stop <= other.start
    for role in unit.roles:
        assert unit.byte_of(role, unit.packed_elems) % 4096 == 0 or role in SCALES


@given(units(), st.sampled_from([4096, 8192]))
def test_chunks_of_an_update_cover_a_unit_and_have_one_format_each(
    unit: Unit, chunk_elems: int
) -> None:
    borders = state_borders(unit, chunk_elems)
    assert borders[-1] == unit.trainable_elems
    chunks = list(state_chunks(unit, chunk_elems))
    assert sum(chunk.num_elems for chunk in chunks) == unit.trainable_elems
    for chunk in chunks:
        assert unit.is_packed(chunk.start) is unit.is_packed(chunk.stop - 1)
        assert chunk.start // chunk_elems == (chunk.stop - 1) // chunk_elems
        needed = sum(
            -(-(unit.byte_of(role, chunk.stop) - unit.byte_of(role, chunk.start)) // 4096) * 4096
            for role in unit.roles
        )
        assert needed <= unit.states.slot_bytes(chunk_elems, 0)


@pytest.mark.parametrize(
    ("dtype", "moments"), [("fp32", 8.0), ("bf16", 4.0), ("int8", 2 * (1 + 4 / BLOCK_ELEMS))]
)
def test_a_unit_takes_the_bytes_that_its_format_promises(dtype: str, moments: float) -> None:
    unit = lay_out("unit", 0, [TensorSpec("w", (1 << 20,))], states=TABLES[dtype])
    bytes_of = UnitExtents.of(unit).role_bytes
    assert sum(bytes_of.values()) / unit.num_elems == 4 + moments
    for role in STATES:
        assert (role in bytes_of) is True
    for role in SCALES:
        assert (role in bytes_of) is (dtype == "int8")


def test_states_that_an_optimizer_lacks_have_no_roles() -> None:
    for count in range(3):
        unit = lay_out("unit", 0, [TensorSpec("w", (100,))], states=StateTable(MOMENTS[:count]))
        assert unit.roles == (Role.PARAM, Role.MASTER_LO, *STATES[:count])


def test_a_third_state_and_an_unknown_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2 states, got a, b, c"):
        StateTable.of(("a", "b", "c"), "fp32")
    with pytest.raises(ConfigError, match="state_dtype: expected fp32, bf16, int8, got 'int4'"):
        StateTable.of(MOMENTS, "int4")


SIZES = (300_000, 290_001, 4097, 700)


@pytest.mark.parametrize("dtype", TABLES)
@pytest.mark.parametrize("chunk_elems", [C, 2 * C, 4 * C])
@pytest.mark.parametrize("grad_dtype", ["bfloat16", "float32"])
def test_written_state_equals_the_reference_in_every_format(
    dtype, chunk_elems, grad_dtype, open_pipeline, store_unit
) -> None:
    stored = store_unit(sizes=SIZES, states=TABLES[dtype], grad_dtype=grad_dtype)
    pipeline = open_pipeline(
        chunk_elems=chunk_elems, num_slots=2, num_threads=2, states=TABLES[dtype]
    )
    job = submit(pipeline, stored, chunk_elems=chunk_elems, checksums=True)
    job.wait()
    assert_updated(stored)
    assert job.stats.num_elems == sum(SIZES)
    assert job.checksums(0).keys() == set(stored.unit.roles)


@pytest.mark.parametrize("place", ["host", "zero"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_states_in_memory_or_zero_are_updated_to_the_same_bits(
    dtype, place, open_pipeline, store_unit
) -> None:
    table = TABLES[dtype]
    placement = dict.fromkeys((*table.states, *table.scales), place)
    stored = store_unit(sizes=SIZES, states=table, placement=placement)
    submit(open_pipeline(chunk_elems=C, states=table), stored, chunk_elems=C).wait()
    assert_updated(stored)


def test_bf16_state_does_not_depend_on_small_chunks(open_pipeline, store_unit) -> None:
    stored = store_unit(states=TABLES["bf16"])
    submit(open_pipeline(num_slots=2, states=TABLES["bf16"]), stored).wait()
    assert_updated(stored)


def test_streams_that_contradict_their_format_are_refused(open_pipeline, store_unit) -> None:
    stored = store_unit(sizes=SIZES, states=TABLES["int8"])
    pipeline = open_pipeline(chunk_elems=C, states=TABLES["int8"])
    for role, field, value in (
        (Role.EXP_AVG_SCALE, "elem_bytes", 0), (Role.EXP_AVG, "elem_bytes", 4),
        (Role.EXP_AVG_SQ, "format", 7), (Role.EXP_AVG, "format", 2), (Role.PARAM, "elem_bytes", 0),
    ):  # fmt: skip
        chunks, segments = chunks_of(stored, chunk_elems=C)
        chunks["streams"][field][0, UPDATE_ROLES.index(role)] = value
        with pytest.raises(StateError, match="inconsistent"):
            pipeline.submit(chunks, segments, ROWS, np.ones(1, np.uint8))


def test_a_state_can_be_read_and_written_outside_of_an_update() -> None:
    values = torch.randn(1000)
    coded = kernels.State("m", torch.zeros(1000, dtype=torch.int8), torch.zeros(4))
    assert not kernels.state_encode(values, coded, index=0, step=1)
    back = torch.empty(1000)
    kernels.state_decode(coded, back)
    assert (back - values).abs().max() <= values.abs().max() / 15


@pytest.mark.parametrize("weight", ["nowhere", "host"])
@pytest.mark.parametrize("dtype", TABLES)
def test_the_weight_of_a_whole_master_is_made_and_not_read(
    dtype, weight, open_pipeline, store_unit
) -> None:
    """Padding and a tensor without a row are copied through: their weights are made as well."""
    table = replace(TABLES[dtype], weights=APART)
    chunk_elems = C if table.packs else 4096
    placement = {Role.PARAM: "zero" if weight == "nowhere" else "host"}
    stored = store_unit(sizes=SIZES, states=table, grad_dtype="float16", placement=placement)
    if weight == "nowhere":  # the fixture zeroed what must not be looked at
        master = stored.initial[Role.MASTER]
        stored.initial[Role.PARAM][: len(master)] = master.half()
    rows = row_of(stored) | {"block.1": None}
    pipeline = open_pipeline(chunk_elems=chunk_elems, states=table, num_threads=2)
    job = submit(pipeline, stored, chunk_elems=chunk_elems, rows=rows, checksums=True)
    job.wait()
    expected = stored.expected(ROWS, rows)
    written = stored.written()
    size = 2 * stored.unit.trainable_elems
    assert written[Role.PARAM][:size] == expected[Role.PARAM][:size]
    assert {**written, Role.PARAM: b""} == {**expected, Role.PARAM: b""}
    assert job.stats.read_bytes[Role.PARAM] == 0
    assert job.stats.write_bytes[Role.MASTER] >= 2 * job.stats.write_bytes[Role.PARAM] - 8192
    assert job.checksums(0).keys() == set(stored.unit.roles)


def test_a_chunk_has_one_master_and_its_segments_in_order(open_pipeline, store_unit) -> None:
    table = StateTable(weights=APART)
    stored = store_unit(sizes=SIZES, states=table, grad_dtype="float16")
    pipeline = open_pipeline(chunk_elems=C, states=table)
    lo, master = (UPDATE_ROLES.index(role) for role in (Role.MASTER_LO, Role.MASTER))
    for change in (
        lambda chunks, segments: chunks["streams"]["elem_bytes"][0].__setitem__(lo, 2),
        lambda chunks, segments: chunks["streams"]["elem_bytes"][0].__setitem__(master, 2),
        lambda chunks, segments: chunks["streams"]["elem_bytes"][0].__setitem__(master, 0),
        lambda chunks, segments: chunks["streams"]["format"][0].__setitem__(0, 0),
        lambda chunks, segments: segments["start"][1:2].__setitem__(0, C - 1),
    ):
        chunks, segments = chunks_of(stored, chunk_elems=4 * C)
        change(chunks, segments)
        with pytest.raises(StateError, match="inconsistent"):
            pipeline.submit(chunks, segments, ROWS, np.ones(1, np.uint8))
