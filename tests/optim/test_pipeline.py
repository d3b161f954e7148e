from __future__ import annotations

import itertools
import os
import threading

import numpy as np
import pytest
from stored_unit import ROWS, assert_updated, chunks_of, row_of, submit

import aio
from offload.errors import StateError, StoreError
from offload.kernels import ADAM_ROW
from offload.optim.chunks import StreamPlace
from offload.optim.pipeline import CHUNK, SEGMENT, UpdatePipeline
from offload.partition.unit import STATE_ROLES, Role, round_up


@pytest.mark.parametrize("queue", ["uring", "libaio", "threads"], indirect=True)
@pytest.mark.parametrize(
    ("chunk_elems", "num_slots"), [(2048, 1), (2048, 4), (4096, 2), (65536, 3), (4 << 20, 1)]
)
def test_written_state_equals_the_reference_bit_for_bit(
    queue, chunk_elems, num_slots, open_pipeline, store_unit, request
):
    stored = store_unit(sizes=(9000, 1, 70_000, 64, 2047))
    if chunk_elems < 65536:
        assert any(
            slot.start // chunk_elems < (slot.stop - 1) // chunk_elems for slot in stored.unit.slots
        )
    assert queue.backend == request.node.callspec.params["queue"]
    pipeline = open_pipeline(chunk_elems=chunk_elems, num_slots=num_slots, num_threads=2)
    submit(pipeline, stored, chunk_elems=chunk_elems).wait()
    assert_updated(stored)


@pytest.mark.parametrize("grad_dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_every_format_are_read_in_that_format(grad_dtype, open_pipeline, store_unit):
    stored = store_unit(grad_dtype=grad_dtype)
    submit(open_pipeline(), stored).wait()
    assert_updated(stored)


CHOICES = {
    Role.PARAM: ["disk", "host", "copy", "beside"],
    Role.MASTER_LO: ["disk", "host"],
    Role.EXP_AVG: ["disk", "host", "zero"],
    Role.EXP_AVG_SQ: ["disk", "zero", "beside"],
    Role.GRAD: ["disk", "host", "late"],
}


def test_every_mix_of_disk_memory_and_zeros_gives_the_same_bits(open_pipeline, store_unit):
    pipeline = open_pipeline()
    for number, places in enumerate(itertools.product(*CHOICES.values())):
        placement = dict(zip(CHOICES, places, strict=True))
        stored = store_unit(f"mix{number}", (2500, 300), placement)
        submit(pipeline, stored).wait()
        assert_updated(stored)
        expected = stored.expected(ROWS, row_of(stored))
        for role in stored.memory.keys() - {Role.GRAD}:
            stays = placement[role] in ("copy", "beside")
            after = stored.before_update(role) if stays else expected[role]
            assert stored.in_memory(role) == after, (placement, role)
        for role in stored.beside:
            num_bytes = stored.initial[role][: stored.unit.trainable_elems].nbytes
            made = bytes(stored.beside[role].view[:num_bytes])
            assert expected[role].startswith(made), (placement, role)
        stored.close()


def test_gradients_may_lie_in_memory_for_some_chunks_and_on_disk_for_others(
    open_pipeline, store_unit
):
    stored = store_unit()
    pieces = aio.Buffer(stored.num_bytes(Role.GRAD))
    raw = stored.path(Role.GRAD, "a").read_bytes()
    pieces.view[: len(raw)] = raw
    places = np.array(
        [pieces.address + i * 4096 if i % 2 else 0 for i in range(len(chunks_of(stored)[0]))],
        np.uint64,
    )
    grad = StreamPlace.grad("bfloat16", host_address=places, read=(stored.files[Role.GRAD, "a"], 0))
    job = submit(open_pipeline(), stored, streams={**stored.streams(), Role.GRAD: grad})
    job.wait()
    assert_updated(stored)
    assert 0 < job.stats.read_bytes[Role.GRAD] < stored.num_bytes(Role.GRAD)


def test_tensors_without_a_row_are_copied_through(open_pipeline, store_unit):
    stored = store_unit()
    rows = {**row_of(stored), stored.unit.slots[2].tensor.name: None}
    del rows[stored.unit.slots[0].tensor.name]
    submit(open_pipeline(), stored, rows=rows).wait()
    assert stored.written() == stored.expected(ROWS, rows)


def test_chunks_get_slots_in_order_of_their_deadline(open_pipeline, store_unit):
    stored = store_unit()
    chunks, segments = chunks_of(stored)
    chunks["deadline"] = [3, 1, 4, 1, 0][: len(chunks)]
    assert len(chunks) == 4
    job = open_pipeline(num_slots=1).submit(chunks, segments, ROWS, np.ones(1, np.uint8))
    job.wait()
    assert job.admitted == [1, 3, 0, 2]


def test_deadlines_order_the_chunks_of_all_jobs(open_pipeline, store_unit):
    pipeline = open_pipeline(num_slots=2)  # of which units that are not released get one
    jobs = []
    for deadline in (5, 9, 1):
        stored = store_unit(f"due{deadline}", (100,), seed=deadline)
        parts = chunks_of(stored, deadline=deadline)
        jobs.append(pipeline.submit(*parts, ROWS, np.zeros(1, np.uint8), keep_alive=stored))
    assert [job.admitted for job in jobs] == [[0], [], []]
    jobs[0].release()
    jobs[0].wait()
    assert [job.admitted for job in jobs] == [[0], [], [0]]


def test_a_unit_waits_for_its_release_and_no_longer(open_pipeline, store_unit):
    first, second = store_unit("first"), store_unit("second", seed=1)
    job = submit(open_pipeline(), first, second, released=False)
    with pytest.raises(TimeoutError, match="'second'"):
        job.wait(1, timeout=0)
    job.release(1)
    job.wait(1)
    assert_updated(second)
    assert not job.done(0)
    assert not first.is_written()
    job.release(0)
    job.wait()
    assert_updated(first)


def test_units_that_are_not_released_leave_a_slot_to_those_that_are(open_pipeline, store_unit):
    pipeline = open_pipeline(num_slots=2)
    urgent, later = store_unit("urgent"), store_unit("later", seed=1)
    held = submit(pipeline, urgent, released=False)
    free = submit(pipeline, later)
    free.wait()
    assert_updated(later)
    assert len(held.admitted) == 1
    held.release()
    held.wait()
    assert_updated(urgent)


def test_one_slot_is_enough_whatever_the_order_of_releases(open_pipeline, store_unit):
    stored = [store_unit(f"u{index}", seed=index) for index in range(4)]
    job = submit(open_pipeline(num_slots=1), *stored, released=False)
    for index in reversed(range(4)):
        job.release(index)
        job.wait(index)
    for unit in stored:
        assert_updated(unit)


def test_jobs_in_flight_together_do_not_mix(open_pipeline, store_unit):
    pipeline = open_pipeline()
    stored = [store_unit(f"u{index}", seed=index) for index in range(6)]
    jobs = [submit(pipeline, *stored[index : index + 2], released=False) for index in (0, 2, 4)]
    threads = [
        threading.Thread(target=job.release, args=(unit,)) for job in jobs for unit in (1, 0)
    ]
    for thread in threads:
        thread.start()
    for job in reversed(jobs):
        job.wait()
    for thread in threads:
        thread.join()
    for unit in stored:
        assert_updated(unit)


def test_statistics_tell_every_byte_and_element(open_pipeline, store_unit):
    stored = store_unit(placement={Role.MASTER_LO: "host", Role.EXP_AVG: "zero"})
    job = submit(open_pipeline(), stored)
    job.wait()
    stats = job.stats
    width = {Role.PARAM: 2, Role.MASTER_LO: 2, Role.EXP_AVG: 4, Role.EXP_AVG_SQ: 4}
    padded = {
        role: round_up(stored.unit.trainable_elems * width[role], 4096) for role in STATE_ROLES
    }
    assert stats.write_bytes == {**padded, Role.GRAD: 0}
    assert stats.read_bytes == {
        Role.PARAM: padded[Role.PARAM],
        Role.MASTER_LO: 0,
        Role.EXP_AVG: 0,
        Role.EXP_AVG_SQ: padded[Role.EXP_AVG_SQ],
        Role.GRAD: stored.num_bytes(Role.GRAD),
    }
    assert stats.num_elems == 3000 + 1 + 4097 + 700
    assert stats.kernel_s > 0
    assert stats.num_nonfinite == 0


def test_masters_that_are_not_finite_are_counted_and_the_job_ends(open_pipeline, store_unit):
    stored = store_unit(placement={Role.GRAD: "host"})
    grad = np.frombuffer(stored.memory[Role.GRAD].view, np.uint16)
    grad[stored.unit.slots[2].start] = 0x7F80  # Inf
    job = submit(open_pipeline(), stored)
    job.wait()
    assert job.stats.num_nonfinite == 1


def test_an_empty_job_has_ended(open_pipeline):
    job = open_pipeline().submit(
        np.zeros(0, CHUNK), np.zeros(0, SEGMENT), np.zeros(0, ADAM_ROW), np.zeros(1, np.uint8)
    )
    job.wait(0)
    job.wait()


# Errors


@pytest.mark.parametrize("role", [Role.PARAM, Role.EXP_AVG_SQ, Role.GRAD])
def test_a_file_that_is_too_short_is_an_error_that_names_unit_and_role(
    role, open_pipeline, store_unit
):
    good, bad = store_unit("good"), store_unit("bad", seed=1)
    os.truncate(bad.path(role, "a"), 0)
    job = submit(open_pipeline(), good, bad, released=True)
    with pytest.raises(StoreError, match=f"'bad'.*read of {role.value} at byte") as caught:
        job.wait()
    assert caught.value.errno
    assert job.done()


def test_a_file_that_cannot_be_written_is_an_error_that_names_unit_and_role(
    open_pipeline, store_unit
):
    stored = store_unit()
    with aio.File(stored.path(Role.EXP_AVG, "b"), "r") as read_only:
        place = StreamPlace(None, (stored.files[Role.EXP_AVG, "a"], 0), (read_only, 0))
        job = submit(open_pipeline(), stored, streams={**stored.streams(), Role.EXP_AVG: place})
        with pytest.raises(
            StoreError, match=r"'block'.*write of exp_avg at byte.*8,192 bytes, got 0"
        ):
            job.wait(0)
        job.close()


def test_an_error_of_one_job_leaves_the_others_alone(open_pipeline, store_unit):
    pipeline = open_pipeline(num_slots=2)
    good, bad = store_unit("good"), store_unit("bad", seed=1)
    os.truncate(bad.path(Role.MASTER_LO, "a"), 4096)
    failing, working = submit(pipeline, bad), submit(pipeline, good)
    with pytest.raises(StoreError, match="master_lo"):
        failing.wait()
    working.wait()
    assert_updated(good)


def test_nothing_is_admitted_after_an_error(open_pipeline, store_unit):
    bad = store_unit()
    os.truncate(bad.path(Role.PARAM, "a"), 0)
    job = submit(open_pipeline(num_slots=1), bad)
    with pytest.raises(StoreError):
        job.wait()
    assert job.admitted == [0]


def test_a_unit_written_before_the_error_counts_as_written(open_pipeline, store_unit):
    good, bad = store_unit("good"), store_unit("bad", seed=1)
    os.truncate(bad.path(Role.PARAM, "a"), 0)
    job = submit(open_pipeline(num_slots=1), good, bad)
    with pytest.raises(StoreError):
        job.wait(1)
    job.wait(0)
    assert_updated(good)


def test_the_first_error_is_kept_when_units_are_released_later(open_pipeline, store_unit):
    held, bad = store_unit("held"), store_unit("bad", seed=1)
    os.truncate(bad.path(Role.PARAM, "a"), 0)
    job = submit(open_pipeline(num_slots=4), held, bad, released=False)
    job.release(1)
    with pytest.raises(StoreError, match="'bad'"):
        job.wait(0)
    job.release(0)
    with pytest.raises(StoreError, match="'bad'"):
        job.wait()
    assert not held.is_written()


def test_a_cancelled_job_ends_its_waits_and_frees_its_slots(open_pipeline, store_unit):
    pipeline = open_pipeline(num_slots=2)
    held, next_one = store_unit("held"), store_unit("next", seed=1)
    job = submit(pipeline, held, released=False)
    errors = []

    def wait() -> None:
        try:
            job.wait(0)
        except StateError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    job.cancel()
    waiting.join()
    assert "cancelled" in errors[0]
    submit(pipeline, next_one).wait()
    assert_updated(next_one)


def test_cancelling_a_job_that_has_ended_changes_nothing(open_pipeline, store_unit):
    stored = store_unit()
    job = submit(open_pipeline(), stored)
    job.wait()
    job.cancel()
    job.wait()
    assert_updated(stored)


def test_closing_the_pipeline_cancels_its_jobs_and_they_can_still_be_asked(
    open_pipeline, store_unit
):
    pipeline = open_pipeline()
    job = submit(pipeline, store_unit(), released=False)
    pipeline.close()
    pipeline.close()
    with pytest.raises(StateError, match="cancelled"):
        job.wait()
    job.release()
    assert job.stats.num_elems == 0
    with pytest.raises(StateError, match="closed"):
        submit(pipeline, store_unit("other"))


def test_a_job_that_is_dropped_or_closed_lets_go_of_what_it_kept_alive(open_pipeline, store_unit):
    class Kept:
        pass

    import weakref

    pipeline = open_pipeline()
    for end in ("close", "drop"):
        chunks, segments = chunks_of(store_unit(end))
        kept = Kept()
        seen = weakref.ref(kept)
        job = pipeline.submit(chunks, segments, ROWS, np.zeros(1, np.uint8), keep_alive=kept)
        del kept
        assert seen() is not None
        if end == "close":
            job.close()
            job.close()
            with pytest.raises(StateError, match="closed"):
                job.wait()
        else:
            del job
        assert seen() is None


def test_inconsistent_arrays_are_refused_before_anything_starts(open_pipeline, store_unit):
    pipeline = open_pipeline()
    flags = np.ones(1, np.uint8)

    def refused(change) -> None:
        chunks, segments = chunks_of(store_unit(f"u{next(numbers)}"))
        change(chunks, segments)
        with pytest.raises(StateError, match="inconsistent"):
            pipeline.submit(chunks, segments, ROWS, flags)

    def set_field(array, name, value):
        array[name][0] = value

    numbers = itertools.count()
    refused(lambda chunks, _: set_field(chunks, "unit", 1))
    refused(lambda chunks, _: set_field(chunks, "num_elems", 4097))  # more than a slot holds
    refused(lambda chunks, _: set_field(chunks, "num_elems", 0))
    refused(lambda chunks, _: set_field(chunks, "num_segments", 99))
    refused(lambda chunks, _: set_field(chunks, "first_segment", 0xFFFFFFFF))
    refused(lambda _, segments: set_field(segments, "num_elems", 0xFFFFFFFF))
    refused(lambda _, segments: set_field(segments, "row", len(ROWS)))
    refused(lambda chunks, _: set_field(chunks["streams"], "elem_bytes", 3))
    chunks, segments = chunks_of(store_unit("last"))
    with pytest.raises(StateError, match="update_chunk"):
        pipeline.submit(segments, segments, ROWS, flags)
    with pytest.raises(StateError, match="contiguous"):
        pipeline.submit(chunks[::2], segments, ROWS, flags)


def test_a_unit_that_the_job_does_not_have_is_refused(open_pipeline, store_unit):
    job = submit(open_pipeline(), store_unit())
    for call in (job.release, job.wait, job.done):
        for unit in (1, -1):
            with pytest.raises(StateError, match="unit of this job"):
                call(unit)
    job.wait()


def test_slots_that_are_too_small_or_settings_that_cannot_be_are_refused(queue):
    memory = memoryview(aio.Buffer(2 * 1024 * 1024).view)
    good = dict(num_slots=1, slot_bytes=2048 * 14, num_threads=1)
    for change in (
        dict(slot_bytes=1000),
        dict(num_threads=0),
        dict(num_slots=0),
        dict(slot_bytes=0),
    ):
        with pytest.raises(StateError, match="cannot open"):
            UpdatePipeline(queue, memory, **{**good, **change})
    with pytest.raises(StateError, match="update slots"):
        UpdatePipeline(queue, memory[: 2048 * 14 - 1], **good)
    with pytest.raises(StateError, match="update slots"):
        UpdatePipeline(queue, memory[512:], **good)


def test_a_forked_child_can_neither_use_nor_hang_on_its_parents_jobs(open_pipeline, store_unit):
    pipeline = open_pipeline()
    stored = store_unit()
    job = submit(pipeline, stored, released=False)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job.release()
        except StateError:
            job.close()
            del job
            pipeline.close()
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.release()
    job.wait()
    assert_updated(stored)
