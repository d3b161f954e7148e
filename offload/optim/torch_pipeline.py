"""The update pipeline for torch classes: the same jobs as `pipeline.py`, carried out in Python.

    one thread:  most urgent chunk of a released unit, a free slot --> reads
                 the oldest chunk that is read --> torch_update --> writes --> slot free

Nothing is read before its unit's release.  What is moved, checked and counted is what the C
pipeline moves.  Threads: a job may be used from any thread; the pipeline has one owner.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aio
from offload.errors import OffloadError, StateError, StoreError
from offload.optim.packing import Packing
from offload.optim.pipeline import UPDATE_ROLES, UnitTimes, UpdateStats
from offload.optim.torch_rule import TorchRule
from offload.optim.torch_update import ChunkMemory, Work, update_chunk
from offload.partition.unit import Role
from offload.store.checksum import BlockSums

_LOG = logging.getLogger(__name__)
_READ_AHEAD = 2  # chunks read or being read


class TorchJob:
    """The ticket of one submission; the pipeline's lock guards what is not constant."""

    def __init__(self, pipeline: TorchPipeline, work: Work, released: Sequence[bool]) -> None:
        self.work = work
        self.closed = False
        self.admitted: list[int] = []  # chunks, in the order in which they got a slot
        self._pipeline = pipeline
        self._progress = _Progress(work, released)

    @property
    def progress(self) -> _Progress:
        """For the pipeline, under its lock."""
        return self._progress

    def release(self, unit: int | None = None) -> None:
        """Let `unit` (None: all units) run; any thread, twice is once."""
        units = range(len(self.work.unit_names)) if unit is None else [unit]
        self._pipeline.release(self, units)

    def wait(
        self, unit: int | None = None, timeout: float | None = None, *, made: bool = False
    ) -> None:  # fmt: skip
        """Block until `unit` (None: the whole job) is written; `made` waits as long here.

        Raises what the update failed with, StateError after a cancellation, TimeoutError.  When it
        raises one of the first two, nothing of the job is in flight.
        """
        with self._pipeline.changed:
            if not self._pipeline.changed.wait_for(lambda: self._ended(unit), timeout):
                raise TimeoutError(f"update of unit {unit}: not ended after {timeout} s.")
            if not self._complete(unit):
                assert self._progress.error is not None
                raise self._progress.error

    def done(self, unit: int | None = None) -> bool:
        """Tell whether `wait(unit)` would return, or raise, at once."""
        with self._pipeline.changed:
            return self._ended(unit)

    def cancel(self) -> None:
        """Drop what has not started; the chunk at work ends.  An ended job stays as it is."""
        self._pipeline.fail(
            self,
            StateError(
                "update: expected it to end, but it was cancelled. The last generation is intact."
            ),
        )

    @property
    def stats(self) -> UpdateStats:
        with self._pipeline.changed:
            return self._progress.stats()

    def times(self) -> list[UnitTimes]:
        """When each unit was updated; nothing unless submitted with `timed=True`."""
        with self._pipeline.changed:
            pairs = zip(self.work.unit_names, self._progress.times, strict=False)
            return [times.of(name) for name, times in pairs]

    def checksums(self, unit: int) -> dict[Role, NDArray[np.uint64]]:
        """The crc32 of each MiB of every role that was written whole, as `UpdateJob.checksums`."""
        if not self.work.checksums:
            raise StateError("update job: expected a job submitted with checksums=True.")
        if not self.done(unit) or not self._complete(unit):
            raise StateError(f"update job: unit {unit} has not ended. Wait for it first.")
        return {
            role: np.frombuffer(sums.finish(), np.uint64)
            for role, sums in self._progress.sums[unit].items()
        }

    def close(self) -> None:
        """Cancel, wait for what is in flight.  May be called twice."""
        if not self.closed:
            self.cancel()
            with suppress(OffloadError):
                self.wait()
            self.closed = True

    def _complete(self, unit: int | None) -> bool:
        left = self._progress.remaining
        return not (any(left) if unit is None else left[unit])

    def _ended(self, unit: int | None) -> bool:
        progress = self._progress
        return self._complete(unit) or (progress.error is not None and not progress.num_active)


class Times:
    """When a unit's stages first began and last ended, in ns; 0: not yet."""

    def __init__(self, submitted_ns: int) -> None:
        self._submitted_ns = submitted_ns
        self._spans = {"read": [0, 0], "kernel": [0, 0], "write": [0, 0]}
        self.released_ns = 0

    def mark(self, stage: str, *, end: int) -> None:
        """A stage begins (`end` 0) or ends (1) now."""
        span = self._spans[stage]
        if end or not span[0]:
            span[end] = time.perf_counter_ns()

    def of(self, name: str) -> UnitTimes:
        read, kernel, write = ((begun, ended) for begun, ended in self._spans.values())
        return UnitTimes(name, self._submitted_ns, self.released_ns, read, kernel, write)


class _Progress:
    """How far a job is."""

    def __init__(self, work: Work, released: Sequence[bool]) -> None:
        units = work.chunks["unit"]
        num_units = len(released)
        self.released = list(released)
        self.remaining: list[int] = np.bincount(units, minlength=num_units).tolist()
        self.num_active = 0  # slots
        self.error: OffloadError | None = None
        self.read_bytes: Counter[Role] = Counter()
        self.write_bytes: Counter[Role] = Counter()
        self.num_elems = 0
        self.num_nonfinite = 0
        self.update_s = 0.0
        self.times: list[Times] = []  # of units; empty: not wanted
        self.sums = [
            {role: BlockSums() for role in _written(work, unit)} for unit in range(num_units)
        ]

    def mark(self, unit: int, stage: str, *, end: int) -> None:
        """Note the time of a unit's stage, if that is wanted."""
        if self.times:
            self.times[unit].mark(stage, end=end)

    def stats(self) -> UpdateStats:
        return UpdateStats(
            read_bytes={role: self.read_bytes[role] for role in UPDATE_ROLES},
            write_bytes={role: self.write_bytes[role] for role in UPDATE_ROLES},
            num_elems=self.num_elems,
            kernel_s=self.update_s,
            checksum_s=0.0,
            most_preread=0,
            most_writing=0,
            num_nonfinite=self.num_nonfinite,
        )


def _written(work: Work, unit: int) -> list[Role]:
    """Roles of which every chunk is written."""
    streams = work.chunks["streams"][work.chunks["unit"] == unit]
    return [
        role
        for index, role in enumerate(UPDATE_ROLES)
        if role is not Role.GRAD and np.all(streams["write_file"][:, index])
    ]


@dataclass
class _Active:
    """A chunk that has a slot's memory, and its transfers in flight."""

    memory: memoryview
    job: TorchJob
    chunk: ChunkMemory
    tickets: list[aio.Ticket] = field(default_factory=list)


class TorchPipeline:
    """Slots and one thread, beside an I/O queue that it shares with others."""

    def __init__(
        self,
        queue: aio.Queue,
        slots: memoryview,  # num_slots * slot_bytes bytes, 4096-aligned, HOST
        rule: TorchRule,
        *,
        num_slots: int,
        slot_bytes: int,  # of all roles of any chunk, each padded to 4096
        packings: Mapping[str, Packing] | None = None,
    ) -> None:
        """Start the thread.  `queue` and `slots` must stay open until close().

        `packings`: of each unit by name, for a rule of whole tensors.
        """
        if num_slots < 1 or len(slots) < num_slots * slot_bytes:
            raise StateError(
                f"update slots: expected {num_slots} of {slot_bytes:,} bytes, got {len(slots):,}."
            )
        self.rule = rule
        self._queue = queue
        self._packings = packings or {}
        self.changed = threading.Condition()  # guards all that follows, and the jobs' progress
        self._open: list[tuple[int, int, TorchJob, int]] = []  # a heap: deadline, order, job, chunk
        self._num_opened = 0
        self._stopping = False
        self._jobs: list[TorchJob] = []
        free = [slots[at * slot_bytes : (at + 1) * slot_bytes] for at in range(num_slots)]
        self._thread = threading.Thread(target=self._run, args=(free,), name="update", daemon=True)
        self._thread.start()

    def submit(
        self,
        chunks: NDArray[np.void],  # (num_chunks,) CHUNK
        segments: NDArray[np.void],  # (num_segments,) SEGMENT
        rows: NDArray[Any],  # (num_rows,) of TorchRow, encoded
        released: NDArray[np.uint8],  # (num_units,)
        *,
        unit_names: Sequence[str],
        keep_alive: Sequence[Sequence[aio.File]],  # every file that the chunks name
        checksums: bool = False,
        timed: bool = False,
    ) -> TorchJob:
        """Queue the chunks of released units; the others wait for `release`."""
        files = [file for some in keep_alive for file in some]
        work = Work.of(chunks, segments, rows, files, unit_names, checksums=checksums)
        job = TorchJob(self, work, [bool(flag) for flag in released])
        if timed:
            job.progress.times = [Times(time.perf_counter_ns()) for _ in released]
        with self.changed:
            if self._stopping:
                raise StateError("update pipeline: expected an open one, got a closed one.")
            self._jobs = [other for other in self._jobs if not other.done()] + [job]
            self._enqueue(job, [unit for unit, flag in enumerate(released) if flag])
        return job

    def release(self, job: TorchJob, units: Sequence[int]) -> None:
        """A job's units may run."""
        with self.changed:
            fresh = [unit for unit in units if not job.progress.released[unit]]
            for unit in fresh:
                job.progress.released[unit] = True
                if job.progress.times:
                    job.progress.times[unit].released_ns = time.perf_counter_ns()
            self._enqueue(job, fresh)

    def fail(self, job: TorchJob, error: OffloadError) -> None:
        """Stop a job that has not ended; its first error stays."""
        with self.changed:
            if any(job.progress.remaining) and job.progress.error is None:
                job.progress.error = error
            self.changed.notify_all()

    def close(self) -> None:
        """Cancel every job, wait for what is in flight, join the thread.  May be called twice."""
        with self.changed:
            self._stopping = True
            jobs, self._jobs = self._jobs, []
            self.changed.notify_all()
        for job in jobs:
            job.cancel()
        self._thread.join()

    def __enter__(self) -> TorchPipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- under the lock

    def _enqueue(self, job: TorchJob, units: Sequence[int]) -> None:
        if job.progress.error is None:
            for chunk in np.flatnonzero(np.isin(job.work.chunks["unit"], units)).tolist():
                deadline = int(job.work.chunks["deadline"][chunk])
                heapq.heappush(self._open, (deadline, self._num_opened, job, chunk))
                self._num_opened += 1
        self.changed.notify_all()

    def _take(self, *, block: bool) -> tuple[TorchJob, int] | None:
        """The most urgent chunk, which is active from now on; None: there is none (or the end)."""
        with self.changed:
            while True:
                while self._open:
                    _, _, job, chunk = heapq.heappop(self._open)
                    if job.progress.error is None:
                        job.progress.num_active += 1
                        job.admitted.append(chunk)
                        return job, chunk
                if not block or self._stopping:
                    return None
                self.changed.wait()

    # --- the thread

    def _run(self, free: list[memoryview]) -> None:
        reading: deque[_Active] = deque()
        writing: deque[_Active] = deque()
        while True:
            if free and len(reading) < _READ_AHEAD:
                taken = self._take(block=not reading and not writing)
                if taken is not None:
                    reading.append(self._activate(free.pop(), *taken))
                    continue
                if not reading and not writing:
                    return
            if reading:
                active = reading.popleft()
                self._guarded(active, self._update)
                writing.append(active)
            while writing and (not free or not reading or _all_done(writing[0])):
                active = writing.popleft()
                self._guarded(active, _wait)
                self._end(active)
                free.append(active.memory)

    def _guarded(self, active: _Active, stage: Callable[[_Active], None]) -> None:
        """Run a stage; an error is the job's, and ends what is in flight of the chunk."""
        if active.job.progress.error is not None:
            _drain(active)
            return
        try:
            stage(active)
        except Exception as error:
            _drain(active)
            self.fail(active.job, _told(error, active))

    def _activate(self, memory: memoryview, job: TorchJob, index: int) -> _Active:
        packing = self._packings.get(job.work.unit_name(index))
        chunk = ChunkMemory(job.work, index, memory, packing)
        active = _Active(memory, job, chunk)
        self._guarded(active, self._read)
        return active

    def _read(self, active: _Active) -> None:
        active.job.progress.mark(active.chunk.unit, "read", end=0)
        active.tickets = [
            self._queue.read(file, memory, offset, deadline=active.chunk.deadline)
            for _, file, memory, offset in active.chunk.reads()
        ]

    def _update(self, active: _Active) -> None:
        _wait(active)
        job, chunk = active.job, active.chunk
        job.progress.mark(chunk.unit, "read", end=1)
        job.progress.mark(chunk.unit, "kernel", end=0)
        begin = time.perf_counter()
        num_elems, num_nonfinite = update_chunk(self.rule, chunk)
        spent = time.perf_counter() - begin
        job.progress.mark(chunk.unit, "kernel", end=1)
        job.progress.mark(chunk.unit, "write", end=0)
        active.tickets = [
            self._queue.write(file, memory, offset, deadline=chunk.deadline)
            for _, file, memory, offset in chunk.writes()
        ]
        if job.work.checksums:
            for role, sums in job.progress.sums[chunk.unit].items():
                sums.add(chunk.data(role))
        with self.changed:
            progress = job.progress
            progress.num_elems += num_elems
            progress.num_nonfinite += num_nonfinite
            progress.update_s += spent
            for role, _, memory, _ in chunk.reads():
                progress.read_bytes[role] += len(memory)
            for role, _, memory, _ in chunk.writes():
                progress.write_bytes[role] += len(memory)

    def _end(self, active: _Active) -> None:
        """The chunk is over: written, or given up."""
        progress = active.job.progress
        progress.mark(active.chunk.unit, "write", end=1)
        with self.changed:
            progress.num_active -= 1
            if progress.error is None:
                progress.remaining[active.chunk.unit] -= 1
            self.changed.notify_all()


def _all_done(active: _Active) -> bool:
    return all(ticket.done() for ticket in active.tickets)


def _wait(active: _Active) -> None:
    for ticket in active.tickets:
        ticket.wait()
    active.tickets = []


def _drain(active: _Active) -> None:
    """Wait for a chunk's transfers, whatever becomes of them: they use its memory."""
    for ticket in active.tickets:
        with suppress(OSError):
            ticket.wait()
    active.tickets = []


def _told(error: Exception, active: _Active) -> OffloadError:
    """What goes wrong, with the unit's name."""
    name = active.job.work.unit_names[active.chunk.unit]
    if isinstance(error, OffloadError):
        return error
    if isinstance(error, OSError):
        told = StoreError(
            f"update of unit {name!r}: {error}. The last committed generation is intact: remove the"
            " cause and resume from it."
        )
        told.errno = error.errno
        return told
    _LOG.debug("update of unit %r", name, exc_info=error)
    return StateError(
        f"update of unit {name!r}: the optimizer failed with {type(error).__name__}: {error}."
        " The last committed generation is intact."
    )
