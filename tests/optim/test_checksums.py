"""What a job says that it wrote is what lies in the files (DESIGN D3)."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest
from stored_unit import ROWS, StoredUnit, assert_updated, chunks_of, stack, submit

from offload.crc import BLOCK_BYTES, Tail
from offload.errors import StateError, StoreError
from offload.optim.chunks import StreamPlace
from offload.optim.pipeline import UPDATE_ROLES
from offload.partition.unit import ELEM_BYTES, STATE_ROLES, Role
from offload.store.extents import CHECKSUM_BLOCK_BYTES, CHECKSUM_BYTES

SIZES = (300_000, 1, 70_001, 260_000)  # 2.4 MiB of moments: blocks that end inside chunks
CHUNK_ELEMS = 2048 * 37  # and chunks that end inside blocks


def sums_of(raw: bytes) -> list[int]:
    return [zlib.crc32(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)]


def on_disk(stored: StoredUnit) -> dict[Role, list[int]]:
    """The sums of what side B holds of the trainable tensors, read back."""
    num_elems = stored.unit.trainable_elems
    return {
        role: sums_of(raw[: stored.unit.byte_of(role, num_elems)])
        for role, raw in stored.written().items()
    }


def told(job, unit: int = 0) -> dict[Role, list[int]]:
    return {role: sums.tolist() for role, sums in job.checksums(unit).items()}


def test_the_store_keeps_the_same_blocks_in_the_same_form():
    assert BLOCK_BYTES == CHECKSUM_BLOCK_BYTES
    assert np.dtype(np.uint64).itemsize == CHECKSUM_BYTES


@pytest.mark.parametrize("chunk_elems", [2048, CHUNK_ELEMS, 1 << 19, 1 << 20])
def test_the_sums_are_those_of_the_bytes_on_disk_whatever_the_chunks(
    chunk_elems, open_pipeline, store_unit
):
    stored = store_unit(sizes=SIZES)
    pipeline = open_pipeline(chunk_elems=chunk_elems, num_slots=4)
    job = submit(pipeline, stored, chunk_elems=chunk_elems, checksums=True)
    job.wait()
    assert_updated(stored)
    assert told(job) == on_disk(stored)
    assert len(told(job)[Role.EXP_AVG]) == 3
    assert job.stats.checksum_s > 0


def test_chunks_that_end_in_any_order_give_the_same_sums(open_pipeline, store_unit):
    stored = store_unit(sizes=SIZES)
    chunks, segments = chunks_of(stored, chunk_elems=CHUNK_ELEMS)
    order = np.random.default_rng(0).permutation(len(chunks))
    chunks["deadline"] = order
    pipeline = open_pipeline(chunk_elems=CHUNK_ELEMS, num_slots=2)
    job = pipeline.submit(chunks, segments, ROWS, np.ones(1, np.uint8), checksums=True)
    job.wait()
    assert job.admitted != sorted(job.admitted)
    assert told(job) == on_disk(stored)


@pytest.mark.parametrize("place", ["host", "copy", "zero"])
def test_the_sums_are_those_of_the_file_wherever_the_state_came_from(
    place, open_pipeline, store_unit
):
    placement = dict.fromkeys(STATE_ROLES, place)
    if place == "zero":
        placement |= {Role.PARAM: "disk", Role.MASTER_LO: "disk"}
    stored = store_unit(sizes=SIZES, placement=placement)
    pipeline = open_pipeline(chunk_elems=CHUNK_ELEMS)
    job = submit(pipeline, stored, chunk_elems=CHUNK_ELEMS, checksums=True)
    job.wait()
    assert_updated(stored)
    assert told(job) == on_disk(stored)


def test_each_unit_of_a_job_has_its_own_sums_as_soon_as_it_has_ended(open_pipeline, store_unit):
    first, second = store_unit("first"), store_unit("second", (9000, 300_000), seed=1)
    job = submit(open_pipeline(), first, second, released=False, checksums=True)
    job.release(1)
    job.wait(1)
    assert told(job, 1) == on_disk(second)
    with pytest.raises(StateError, match=r"'first'.*Wait for it"):
        job.checksums(0)
    job.release(0)
    job.wait(0)
    assert told(job, 0) == on_disk(first)


def test_the_sums_reach_the_end_of_a_flat_buffer_with_those_of_its_frozen_tail(
    open_pipeline, store_unit
):
    stored = store_unit(sizes=SIZES)
    pipeline = open_pipeline(chunk_elems=CHUNK_ELEMS)
    job = submit(pipeline, stored, chunk_elems=CHUNK_ELEMS, checksums=True)
    job.wait()
    start = stored.unit.trainable_elems * ELEM_BYTES[Role.PARAM]
    flat = stored.written()[Role.PARAM]
    assert len(flat) > start
    frozen = stored.before_update(Role.PARAM)[start:]
    whole = Tail.of(frozen, start).complete(job.checksums(0)[Role.PARAM])
    assert whole.tolist() == sums_of(flat)


def test_a_role_that_is_not_written_whole_has_no_sums(open_pipeline, store_unit):
    stored = store_unit(sizes=SIZES)
    chunks, segments = chunks_of(stored, chunk_elems=CHUNK_ELEMS)
    chunks["streams"]["write_file"][3, UPDATE_ROLES.index(Role.EXP_AVG)] = 0
    pipeline = open_pipeline(chunk_elems=CHUNK_ELEMS)
    job = pipeline.submit(chunks, segments, ROWS, np.ones(1, np.uint8), checksums=True)
    job.wait()
    assert job.checksums(0).keys() == {Role.PARAM, Role.MASTER_LO, Role.EXP_AVG_SQ}


def test_sums_that_nobody_asked_for_are_not_computed(open_pipeline, store_unit):
    job = submit(open_pipeline(), store_unit())
    job.wait()
    assert job.stats.checksum_s == 0
    with pytest.raises(StateError, match="checksums=True"):
        job.checksums(0)


def test_a_unit_that_ended_before_an_error_has_sums_and_the_others_have_none(
    open_pipeline, store_unit
):
    good, bad = store_unit("good"), store_unit("bad", seed=1)
    os.truncate(bad.path(Role.PARAM, "a"), 0)
    job = submit(open_pipeline(num_slots=1), good, bad, checksums=True)
    with pytest.raises(StoreError):
        job.wait()
    assert told(job, 0) == on_disk(good)
    with pytest.raises(StateError, match="'bad'"):
        job.checksums(1)


def test_a_failed_write_gives_no_sums(open_pipeline, store_unit):
    import aio

    stored = store_unit()
    with aio.File(stored.path(Role.PARAM, "b"), "r") as read_only:
        place = StreamPlace(None, (stored.files[Role.PARAM, "a"], 0), (read_only, 0))
        streams = {**stored.streams(), Role.PARAM: place}
        job = submit(open_pipeline(), stored, streams=streams, checksums=True)
        with pytest.raises(StoreError):
            job.wait()
        with pytest.raises(StateError, match="has not ended"):
            job.checksums(0)
        job.close()


def test_a_unit_that_the_job_does_not_have_is_refused(open_pipeline, store_unit):
    job = submit(open_pipeline(), store_unit(), checksums=True)
    job.wait()
    for unit in (1, -1):
        with pytest.raises(StateError, match="unit of this job"):
            job.checksums(unit)


def test_a_job_of_many_units_keeps_their_sums_apart(open_pipeline, store_unit):
    units = [store_unit(f"u{i}", (5000 + i, 300_000), seed=i) for i in range(4)]
    parts = [chunks_of(unit, chunk_elems=CHUNK_ELEMS, unit_index=i) for i, unit in enumerate(units)]
    job = open_pipeline(chunk_elems=CHUNK_ELEMS, num_slots=4).submit(
        *stack(parts), ROWS, np.ones(4, np.uint8), checksums=True
    )
    job.wait()
    for index, unit in enumerate(units):
        assert told(job, index) == on_disk(unit)
