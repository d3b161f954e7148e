"""Jobs that are submitted before their gradients exist: what is read when, and who gets slots."""

from __future__ import annotations

import os

import numpy as np
import pytest
from stored_unit import ROWS, StoredUnit, assert_updated, chunks_of, submit

import aio
from aio.faults import Faults
from offload.errors import StateError, StoreError
from offload.optim.pipeline import AFTER_RELEASE, UPDATE_ROLES
from offload.partition.unit import Role

ON_REQUEST = pytest.mark.parametrize("queue", ["faults"], indirect=True)
NUM_CHUNKS = 4  # of the unit that `store_unit` makes
EARLY_READS = 4  # of a chunk whose gradients are read late
WRITES = 4


def forget_gradients(stored: StoredUnit) -> None:
    """Before the gradients exist: memory holds garbage, the file is empty."""
    if Role.GRAD in stored.memory:
        np.frombuffer(stored.memory[Role.GRAD].view, np.uint8)[:] = 0xAB
    else:
        os.truncate(stored.path(Role.GRAD, "a"), 0)


@pytest.mark.parametrize("queue", ["uring", "libaio", "threads"], indirect=True)
@pytest.mark.parametrize("place", ["host", "late", "copy"])
@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_gradients_may_come_between_submission_and_release(
    place, num_slots, open_pipeline, store_unit
):
    stored = [store_unit(f"u{i}", seed=i, placement={Role.GRAD: place}) for i in range(3)]
    for unit in stored:
        forget_gradients(unit)
    job = submit(open_pipeline(num_slots=num_slots), *stored, released=False)
    for index in (2, 1, 0):  # as backward does
        stored[index].fill_gradients()
        job.release(index)
    job.wait()
    for unit in stored:
        assert_updated(unit)


def test_weights_in_memory_may_come_before_the_release_and_stay_as_they_are(
    open_pipeline, store_unit
):
    stored = store_unit(placement={Role.PARAM: "copy", Role.GRAD: "host"})
    weights = np.frombuffer(stored.memory[Role.PARAM].view, np.uint8)
    resident = weights.copy()
    weights[:] = 0xAB
    job = submit(open_pipeline(), stored, released=False)
    weights[:] = resident
    job.release()
    job.wait()
    assert_updated(stored)
    assert weights.tobytes() == resident.tobytes()
    assert job.stats.read_bytes[Role.PARAM] == 0


@pytest.fixture
def faults(queue: aio.Queue) -> Faults:
    return Faults(queue)


def count(faults: Faults, operation: str) -> int:
    return sum(block.operation == operation for block in faults.log())


@ON_REQUEST
def test_gradients_on_disk_are_read_after_the_release_and_the_rest_before(
    faults, open_pipeline, store_unit
):
    stored = store_unit(placement={Role.GRAD: "late"})
    forget_gradients(stored)  # an early read of them is an error
    job = submit(open_pipeline(num_slots=2 * NUM_CHUNKS), stored, released=False)
    faults.wait_submitted(EARLY_READS * NUM_CHUNKS)
    stored.fill_gradients()
    job.release()
    job.wait()
    assert_updated(stored)
    assert count(faults, "read") == (EARLY_READS + 1) * NUM_CHUNKS


@ON_REQUEST
def test_late_reads_do_not_wait_for_the_early_ones(faults, open_pipeline, store_unit):
    stored = store_unit(sizes=(500,), placement={Role.GRAD: "late"})
    faults.allow(0)
    job = submit(open_pipeline(), stored, released=False)
    faults.wait_submitted(EARLY_READS)
    job.release()
    faults.wait_submitted(EARLY_READS + 1)
    assert [block.operation for block in faults.log()] == ["read"] * (EARLY_READS + 1)
    faults.allow()
    job.wait()
    assert_updated(stored)


@ON_REQUEST
def test_a_chunk_that_gets_its_slot_after_the_release_reads_everything_at_once(
    faults, open_pipeline, store_unit
):
    stored = store_unit(sizes=(500,), placement={Role.GRAD: "late"})
    faults.allow(0)
    job = submit(open_pipeline(), stored, released=True)
    faults.wait_submitted(EARLY_READS + 1)
    faults.allow()
    job.wait()
    assert_updated(stored)


@ON_REQUEST
def test_a_job_that_is_cancelled_before_its_release_never_reads_gradients(
    faults, open_pipeline, store_unit
):
    stored = store_unit(placement={Role.GRAD: "late"})
    forget_gradients(stored)
    pipeline = open_pipeline(num_slots=2 * NUM_CHUNKS)
    job = submit(pipeline, stored, released=False)
    faults.wait_submitted(EARLY_READS * NUM_CHUNKS)
    job.cancel()
    job.release()
    with pytest.raises(StateError, match="cancelled"):
        job.wait()
    assert not stored.is_written()
    stored.fill_gradients()
    again = submit(pipeline, stored)  # the redo, in the slots that the first one gave back
    again.wait()
    assert_updated(stored)
    assert count(faults, "read") == (EARLY_READS + EARLY_READS + 1) * NUM_CHUNKS


def test_a_late_read_that_fails_names_the_gradients(open_pipeline, store_unit):
    stored = store_unit(placement={Role.GRAD: "late"})
    forget_gradients(stored)
    job = submit(open_pipeline(), stored, released=False)
    job.release()
    with pytest.raises(StoreError, match=r"'block'.*read of grad at byte"):
        job.wait()


@pytest.mark.parametrize(
    ("field", "role"),
    [("read_offset", Role.PARAM), ("read_offset", Role.GRAD), ("write_offset", Role.PARAM)],
)
def test_a_transfer_that_the_queue_refuses_ends_the_job_and_frees_the_slot(
    field, role, open_pipeline, store_unit
):
    pipeline = open_pipeline(num_slots=2)  # the first chunk is read ahead
    bad, good = store_unit("bad", placement={Role.GRAD: "late"}), store_unit("good", seed=1)
    chunks, segments = chunks_of(bad)
    chunks["streams"][field][0, UPDATE_ROLES.index(role)] = 1 << 63
    job = pipeline.submit(chunks, segments, ROWS, np.zeros(1, np.uint8), unit_names=["bad"])
    job.release()
    verb = field.removesuffix("_offset")
    with pytest.raises(StoreError, match=f"'bad'.*{verb} of {role.value} at byte .*Invalid"):
        job.wait()
    submit(pipeline, good).wait()
    assert_updated(good)


def test_a_late_read_needs_a_file_and_a_copy_room_in_the_slot(open_pipeline, store_unit):
    pipeline = open_pipeline(grad_elem_bytes=2)

    def refused(stored: StoredUnit, flags: int) -> None:
        chunks, segments = chunks_of(stored)
        chunks["streams"]["flags"][0, -1] = flags
        with pytest.raises(StateError, match="inconsistent"):
            pipeline.submit(chunks, segments, ROWS, np.ones(1, np.uint8))

    for place in ("host", "copy", "zero"):
        refused(store_unit(place, placement={Role.GRAD: place}), AFTER_RELEASE)
    # fp32 gradients in memory are used there; a copy does not fit into slots for 16 bits
    refused(store_unit("wide", placement={Role.GRAD: "copy"}, grad_dtype="float32"), 0)
    settings = {"placement": {Role.GRAD: "host"}, "grad_dtype": "float32"}
    stored = store_unit("fits", **settings)
    submit(pipeline, stored).wait()
    assert_updated(stored)


# Slots


@pytest.mark.parametrize(
    ("num_slots", "num_preread", "expected"),
    [(1, 0, 0), (2, 0, 1), (3, 0, 1), (8, 0, 4), (8, 1, 1), (8, 6, 6), (8, 7, 7), (8, 99, 7)],
)
def test_units_that_are_not_released_hold_a_bounded_number_of_slots(
    num_slots, num_preread, expected, open_pipeline, store_unit
):
    pipeline = open_pipeline(num_slots=num_slots, num_preread=num_preread)
    early = [store_unit(f"early{i}", seed=i) for i in range(3)]
    jobs = [submit(pipeline, unit, released=False) for unit in early]
    assert sum(len(job.admitted) for job in jobs) == expected
    assert max(job.stats.most_preread for job in jobs) == expected
    free = store_unit("free", (30_000,), seed=9)
    submit(pipeline, free).wait()  # gets through
    assert_updated(free)
    assert sum(len(job.admitted) for job in jobs) == expected
    for unit, job in zip(reversed(early), reversed(jobs), strict=True):
        job.release()
        job.wait()
        assert_updated(unit)


def test_slots_of_a_released_unit_do_not_count_as_read_ahead(open_pipeline, store_unit):
    pipeline = open_pipeline(num_slots=4, num_preread=2)
    first, second = store_unit("first"), store_unit("second", seed=1)
    jobs = [submit(pipeline, unit, released=False) for unit in (first, second)]
    assert [job.admitted for job in jobs] == [[0, 1], []]
    jobs[0].release()
    jobs[0].wait()
    assert_updated(first)
    assert len(jobs[1].admitted) == 2
    jobs[1].cancel()


def test_reading_ahead_follows_the_deadlines(open_pipeline, store_unit):
    stored = store_unit()
    chunks, segments = chunks_of(stored)
    chunks["deadline"] = [3, 1, 2, 0]
    pipeline = open_pipeline(num_slots=4, num_preread=2)
    job = pipeline.submit(chunks, segments, ROWS, np.zeros(1, np.uint8))
    assert job.admitted == [3, 1]
    job.cancel()


@ON_REQUEST
@pytest.mark.parametrize(("num_writing", "expected"), [(0, 2), (1, 1), (3, 3), (9, 4)])
def test_writes_take_a_bounded_number_of_slots(
    num_writing, expected, faults, open_pipeline, store_unit
):
    stored = store_unit()
    pipeline = open_pipeline(num_slots=4, num_writing=num_writing)
    faults.allow(NUM_CHUNKS * 5)  # the reads; writes are held
    job = submit(pipeline, stored)
    faults.wait_submitted(NUM_CHUNKS * 5 + expected * WRITES)
    assert count(faults, "write") == expected * WRITES
    faults.allow()
    job.wait()
    assert_updated(stored)
    assert job.stats.most_writing == expected
