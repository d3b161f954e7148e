"""The update pipeline: chunks of state through bounded memory, in C (csrc/update/update.h).

    job = pipeline.submit(chunks, segments, rows, released)   nothing blocks
    job.release(unit)                                         its gradients are final
    job.wait(unit)                                            its new generation is written
    job.checksums(unit)                                       ... and these are its blocks' sums

One of the two files where pointers cross to C: arrays are checked here.  Threads: `UpdateJob` may
be used from any thread; `UpdatePipeline` has one owner, `submit` may come from several threads.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from _offload_native import ffi, lib
from numpy.typing import NDArray

import aio
from offload.errors import StateError, StoreError
from offload.kernels import ROW
from offload.partition.states import SCALES, STATES, STORE_ALIGN_BYTES, Role

UPDATE_ROLES = (Role.PARAM, Role.MASTER_LO, Role.MASTER, *STATES, *SCALES, Role.GRAD)
_SOME_HAVE = frozenset({Role.MASTER, *SCALES})
UPDATE_COPY: int = lib.UPDATE_COPY  # a segment's row: copied through
AFTER_RELEASE: int = lib.UPDATE_AFTER_RELEASE  # flag of a STREAM: see update.h
_SIGNAL_POLL_S = 0.1  # a wait looks for Ctrl-C this often; the end of the wait itself is not polled

STREAM = np.dtype(
    [("host", "<u8"), ("source", "<u8"), ("read_file", "<u8"), ("read_offset", "<u8"),
     ("write_file", "<u8"), ("write_offset", "<u8"), ("elem_bytes", "<u4"), ("format", "<u2"),
     ("flags", "<u2")]
)  # fmt: skip
CHUNK = np.dtype(
    [("deadline", "<u8"), ("unit", "<u4"), ("num_elems", "<u4"), ("first_segment", "<u4"),
     ("num_segments", "<u4"), ("streams", STREAM, len(UPDATE_ROLES))]
)  # fmt: skip
SEGMENT = np.dtype(
    [("start", "<u4"), ("num_elems", "<u4"), ("row", "<u4"), ("reserved", "<u4"), ("key", "<u8"),
     ("first", "<u8")]
)  # fmt: skip


@dataclass(frozen=True)
class UpdateStats:
    """What a job has moved so far: bytes as transferred, rounded up to 4096."""

    read_bytes: Mapping[Role, int]
    write_bytes: Mapping[Role, int]
    num_elems: int  # through the kernel
    kernel_s: float
    checksum_s: float
    most_preread: int  # slots of units that were not released, when this job got one of them
    most_writing: int  # slots in writing, when this job began one of them
    num_nonfinite: int  # segments whose updated master is not finite: an error of the step (T2)


@dataclass(frozen=True)
class UnitTimes:
    """When a unit of a job was updated, in ns of time.perf_counter_ns(); 0: not (yet)."""

    name: str
    submitted_ns: int
    released_ns: int
    read_ns: tuple[int, int]  # the first began, the last ended
    kernel_ns: tuple[int, int]
    write_ns: tuple[int, int]


def file_address(file: aio.File) -> int:
    """The `aio_file *` of an open file, for a STREAM."""
    return int(ffi.cast("uintptr_t", file.native))


class _Job:
    """Owns one `update_job *`: freed when nobody uses it, a thread inside a wait included."""

    def __init__(self, native: Any, keep_alive: object) -> None:
        self.native = native
        finalizer = weakref.finalize(self, _free_job, native, os.getpid(), keep_alive)
        # Finalizers run youngest first at exit: this one would free a step that its engine, which
        # is older, has still to finish.  The pipeline's own waits for all that is in flight.
        finalizer.atexit = False


def _free_job(native: Any, pid: int, keep_alive: object) -> None:
    """Wait for what is in flight, free; only then may `keep_alive` go.  A fork has no threads."""
    if os.getpid() == pid:
        lib.update_job_free(native)


def _close_pipeline(native: Any, pid: int, keep_alive: object) -> None:
    if os.getpid() == pid:
        lib.update_close(native)


class UpdateJob:
    """The ticket of one submission.  Dropping it cancels what has not started."""

    def __init__(
        self, job: _Job, num_units: int, unit_names: Sequence[str], submitted_ns: int = 0
    ) -> None:
        self._job: _Job | None = job
        self._num_units = num_units
        self._unit_names = unit_names
        self._submitted_ns = submitted_ns
        self._pid = os.getpid()

    def _open(self) -> _Job:
        job = self._job
        if job is None or os.getpid() != self._pid:
            raise StateError(
                "update job: expected an open one, got one that is closed or belongs to the parent"
                " process. Use it before close(), in the process that submitted it."
            )
        return job

    @property
    def closed(self) -> bool:
        """True after `close()`."""
        return self._job is None

    def release(self, unit: int | None = None) -> None:
        """Let the kernels of `unit` (None: of all units) run; any thread, twice is once."""
        lib.update_release(self._open().native, self._unit_index(unit))

    def wait(
        self, unit: int | None = None, timeout: float | None = None, *, made: bool = False
    ) -> None:  # fmt: skip
        """Block until `unit` (None: the whole job) is written; the GIL is released.

        `made`: until its kernels have ended.  What is updated in host memory can then be read, and
        may still be being written.
        Raises StoreError (from the failed transfer), StateError after a cancellation, TimeoutError.
        When it raises one of the first two, nothing of the job is in flight.
        """
        job = self._open()
        end = None if timeout is None else time.monotonic() + timeout
        status = self._status(job, unit, 0.0, made)
        while status == -errno.ETIME:
            left = _SIGNAL_POLL_S if end is None else min(_SIGNAL_POLL_S, end - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"update of {self._name(unit)}: not ended after {timeout} s.")
            status = self._status(job, unit, left, made)
        if status < 0:
            raise _error_of(job, self._name)

    def done(self, unit: int | None = None) -> bool:
        """Tell whether `wait(unit)` would return, or raise, at once."""
        return self._status(self._open(), unit, 0.0) != -errno.ETIME

    def cancel(self) -> None:
        """Drop what has not started; transfers in flight end.  An ended job stays as it is."""
        lib.update_cancel(self._open().native)

    @property
    def stats(self) -> UpdateStats:
        job = self._open()
        stats, error = ffi.new("update_stats *"), ffi.new("update_error *")
        lib.update_job_stats(job.native, stats)
        lib.update_job_error(job.native, error)
        return UpdateStats(
            read_bytes=_by_role(stats.read_bytes),
            write_bytes=_by_role(stats.write_bytes),
            num_elems=stats.elems,
            kernel_s=stats.kernel_ns * 1e-9,
            checksum_s=stats.checksum_ns * 1e-9,
            most_preread=stats.most_preread,
            most_writing=stats.most_writing,
            num_nonfinite=error.nonfinite,
        )

    def times(self) -> list[UnitTimes]:
        """When each unit was updated; all 0 unless the job was submitted with `timed=True`."""
        job, told = self._open(), []
        times = ffi.new("update_times *")
        for unit, name in enumerate(self._unit_names):
            lib.update_job_times(job.native, self._unit_index(unit), times)
            spans = (times.read_ns, times.kernel_ns, times.write_ns)
            told.append(
                UnitTimes(
                    name, self._submitted_ns, times.released_ns,
                    *((int(span[0]), int(span[1])) for span in spans),
                )
            )  # fmt: skip
        return told

    def checksums(self, unit: int) -> dict[Role, NDArray[np.uint64]]:
        """Return the crc32 of each MiB of every role that was written whole, for an ended unit.

        Counted from the first element of the unit; the last block ends with the last trainable
        element (`offload.crc.Tail` adds what lies behind).  In memory they are as the store keeps
        them.  The job must have been submitted with `checksums=True`.
        """
        job = self._open()
        index = self._unit_index(unit)
        sums: dict[Role, NDArray[np.uint64]] = {}
        for number, role in enumerate(UPDATE_ROLES):
            count = lib.update_job_checksums(job.native, index, number, ffi.NULL, 0)
            if count < 0:
                raise StateError(f"update job: no checksums of {self._name(unit)}: {_WHY[count]}")
            if count > 0:
                sums[role] = np.empty(count, np.uint64)
                out = ffi.cast("uint64_t *", ffi.from_buffer(sums[role]))
                lib.update_job_checksums(job.native, index, number, out, count)
        return sums

    @property
    def admitted(self) -> list[int]:
        """Indices of the chunks that got a slot, in that order."""
        job = self._open()
        count = lib.update_job_order(job.native, ffi.NULL, 0)
        order = ffi.new("uint32_t[]", count)
        return list(order[0 : min(count, lib.update_job_order(job.native, order, count))])

    def close(self) -> None:
        """Cancel, wait for what is in flight, free.  May be called twice."""
        job, self._job = self._job, None
        if job is not None and os.getpid() == self._pid:
            lib.update_cancel(job.native)
            lib.update_wait(job.native, lib.UPDATE_ALL, -1)

    def _status(self, job: _Job, unit: int | None, timeout: float, made: bool = False) -> int:
        wait = lib.update_wait_made if made else lib.update_wait
        status: int = wait(job.native, self._unit_index(unit), int(timeout * 1e9))
        return status

    def _unit_index(self, unit: int | None) -> int:
        if unit is None:
            return int(lib.UPDATE_ALL)
        if not 0 <= unit < self._num_units:
            raise StateError(
                f"update job: expected a unit of this job, one of {self._num_units}, got {unit}."
            )
        return unit

    def _name(self, unit: int | None) -> str:
        if unit is None:
            return "all units"
        return repr(self._unit_names[unit]) if unit < len(self._unit_names) else f"unit {unit}"


def _error_of(job: _Job, name: Callable[[int], str]) -> StateError | StoreError:
    """What a job failed with; `name(unit)` for the message."""
    error = ffi.new("update_error *")
    lib.update_job_error(job.native, error)
    if error.error == errno.ECANCELED:
        return StateError(
            "update: expected it to end, but it was cancelled. The last generation is intact."
        )
    return _transfer_error(error, name(error.unit))


def _by_role(counts: Any) -> dict[Role, int]:
    """Whole masters and scales only where there are some."""
    pairs = zip(UPDATE_ROLES, counts, strict=True)
    return {role: count for role, count in pairs if count or role not in _SOME_HAVE}


def _transfer_error(error: Any, unit: str) -> StoreError:
    verb = {lib.AIO_READ: "read", lib.AIO_WRITE: "write"}.get(error.op, "compute")
    told = StoreError(
        f"update of unit {error.unit} ({unit}): {verb} of"
        f" {UPDATE_ROLES[error.role].value} at byte {error.offset:,}: expected"
        f" {error.wanted:,} bytes, got {error.done:,}: {os.strerror(error.error)}."
        " The last committed generation is intact: remove the cause and resume from it."
    )
    told.errno = error.error
    return told


_WHY = {
    -errno.ENODATA: "expected a job submitted with checksums=True.",
    -errno.EAGAIN: "it has not ended. Wait for it first.",
}


class UpdatePipeline:
    """Slots, one update thread, and an I/O queue that it shares with others."""

    def __init__(
        self,
        queue: aio.Queue,
        slots: memoryview,  # num_slots * slot_bytes bytes, 4096-aligned, HOST
        *,
        num_slots: int,
        slot_bytes: int,
        num_threads: int,
        num_preread: int = 0,
        num_writing: int = 0,
    ) -> None:
        """Start the update thread.  `queue` and `slots` must stay open until close().

        `slot_bytes`: what the roles of the largest chunk take, each rounded up to 4096 (see
        `StateTable.slot_bytes`).  `num_preread` bounds the slots of units that are not released
        yet, `num_writing` those whose writes are in flight; 0: half of the slots.
        """
        memory = ffi.from_buffer(slots, require_writable=True)
        needed = num_slots * slot_bytes
        address = int(ffi.cast("uintptr_t", memory))
        if len(memory) < needed or address % STORE_ALIGN_BYTES:
            raise StateError(
                f"update slots: expected {needed:,} bytes at a multiple of {STORE_ALIGN_BYTES},"
                f" got {len(memory):,} bytes at {address:#x}."
            )
        out = ffi.new("update_pipeline **")
        config = (slot_bytes, num_slots, num_threads, num_preread, num_writing)
        status = lib.update_open(queue.native, memory, ffi.new("update_config *", config), out)
        if status < 0:
            raise StateError(
                f"update pipeline: cannot open with {num_slots} slots of {slot_bytes:,} bytes and"
                f" {num_threads} threads: {os.strerror(-status)}."
                f" Use at least one slot and thread, and slots of a multiple of 4096 bytes."
            )
        self._native = out[0]
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the C pipeline's existence: submit against close
        self._finalizer = weakref.finalize(
            self, _close_pipeline, out[0], os.getpid(), (queue, memory)
        )

    def submit(
        self,
        chunks: NDArray[np.void],  # (num_chunks,) CHUNK
        segments: NDArray[np.void],  # (num_segments,) SEGMENT
        rows: NDArray[np.void],  # (num_rows,) ROW
        released: NDArray[np.uint8],  # (num_units,)
        *,
        unit_names: Sequence[str] = (),
        keep_alive: object = None,
        checksums: bool = False,
        timed: bool = False,
    ) -> UpdateJob:
        """Queue the chunks; units whose flag is 0 run up to their kernel and wait for `release`.

        The arrays are copied.  Files and host buffers that the chunks name stay untouched by others
        until their unit is waited for; host buffers, and files that are read after the release, may
        be filled until then.  `keep_alive` is held until the job is closed.  `checksums` makes
        `UpdateJob.checksums` possible, `timed` `UpdateJob.times`.
        """
        arrays = (
            (chunks, np.dtype(CHUNK)), (segments, np.dtype(SEGMENT)), (rows, np.dtype(ROW)),
            (released, np.dtype(np.uint8)),
        )  # fmt: skip
        pointers = [_pointer(array, dtype) for array, dtype in arrays]
        flags = lib.UPDATE_CHECKSUMS * checksums | lib.UPDATE_TIMES * timed
        submitted_ns = time.perf_counter_ns() if timed else 0
        work = ffi.new("update_work *", [*pointers, *(len(array) for array, _ in arrays), flags])
        out = ffi.new("update_job **")
        own = os.getpid() == self._pid  # before the lock: a fork may have copied it locked
        with self._lock if own else nullcontext():
            if not (own and self._finalizer.alive):
                raise StateError("update pipeline: expected an open one, got a closed one.")
            status = lib.update_submit(self._native, work, out)
        if status < 0:
            raise StateError(
                f"update: expected chunks that fit their segments, rows, units and a slot, got an"
                f" inconsistent set of {len(chunks):,} chunks ({os.strerror(-status)})."
            )
        job = _Job(out[0], (self, keep_alive))
        return UpdateJob(job, len(released), unit_names, submitted_ns)

    def close(self) -> None:
        """Cancel every job, wait for what is in flight, join the thread.  May be called twice."""
        if os.getpid() == self._pid:
            with self._lock:
                self._finalizer()

    def __enter__(self) -> UpdatePipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_C_NAMES = {
    CHUNK: "update_chunk", SEGMENT: "update_segment", ROW: "simd_row",
    np.dtype(np.uint8): "uint8_t",
}  # fmt: skip


def _pointer(array: NDArray[Any], dtype: np.dtype[Any]) -> Any:
    """The address of a contiguous one-dimensional array of exactly this type."""
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise StateError(
            f"update: expected a contiguous array of {_C_NAMES[dtype]},"
            f" got {array.dtype} of shape {array.shape}."
        )
    return ffi.cast(f"{_C_NAMES[dtype]} *", ffi.from_buffer(array)) if len(array) else ffi.NULL


def _check_layout(dtype: np.dtype[Any], name: str) -> None:
    """The numpy type and the C structure are the same bytes."""
    assert dtype.itemsize == ffi.sizeof(name), name
    for field, place in (dtype.fields or {}).items():
        assert place[1] == ffi.offsetof(name, field), f"{name}.{field}"


_check_layout(STREAM, "update_stream")
_check_layout(CHUNK, "update_chunk")
_check_layout(SEGMENT, "update_segment")
_check_layout(ROW, "simd_row")
