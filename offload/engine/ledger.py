"""Where the current generation of each unit is, and the update that is making the next one.

    committed --submit(job)--> pending: updated units read from the other side, each as soon as it
    is written pending --job ended and late state captured--> commit --> committed

One step is pending at most: its successor's first write waits for the commit (DESIGN D7).
A commit that flushes runs on a thread of its own, behind the next forward; `finish` waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from offload.engine.generation import encode, is_same, with_late
from offload.engine.interrupts import uninterrupted
from offload.engine.sealing import Sealer
from offload.errors import StateError, StoreError
from offload.metrics import Metrics
from offload.optim.jobs import Job
from offload.partition.unit import Role, Unit
from offload.store.files import Extent
from offload.store.store import Store

_LOG = logging.getLogger(__name__)
STEP_CLOCK = 1 << 32  # deadlines of one step come before those of the next


@dataclass(frozen=True)
class Made:
    """The job that makes a unit's next generation, and the unit's number in it."""

    job: Job
    number: int

    def done(self) -> bool:
        return self.job.done(self.number)

    def wait(self) -> None:
        self.job.wait(self.number)


@dataclass
class Pending:
    """A submitted update and what its commit will say."""

    made: Mapping[int, Made]  # by unit
    sides: dict[str, int]
    generation: int
    state: dict[str, Any]  # captured when step() returned
    late: dict[str, Any] | None = None  # what steps after step(), captured at the next engine call

    @property
    def jobs(self) -> list[Job]:
        """Each job once."""
        return list({id(made.job): made.job for made in self.made.values()}.values())


class Ledger:
    """Sides and generations of all units; implements the fetcher's Source."""

    def __init__(
        self, store: Store, units: Mapping[int, Unit], metrics: Metrics, *,
        capture_late: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.store = store
        self.units = units
        self.metrics = metrics
        self._capture_late = capture_late
        self.sealer = Sealer(store)
        self._pending: Pending | None = None
        self._commit: Future[None] | None = None  # under way, on a thread of its own
        self.zero_moments: set[int] = set(units)  # units whose moments were never written
        self.sides = dict.fromkeys(units, 0)
        self.first_checksums: Mapping[str, int] = {}  # of the initial weights
        self._late_moves: bool | None = None  # False: schedulers do not step after every step
        self._clock = 0

    # --- Source

    def ready(self, unit: int) -> bool:
        pending = self._pending
        return pending is None or unit not in pending.made or pending.made[unit].done()

    def place(self, unit: int, role: Role) -> Extent:
        self.wait(unit)
        return self.store.extent(self.units[unit].name, role, self.sides[unit])

    def deadline(self) -> int:
        return self._clock

    def next_side(self, unit: int) -> int:
        """The side that the unit's next generation is written to."""
        return self.store.spare(self.units[unit].name)

    def next_deadline(self) -> int:
        """The deadline of the step that `submit` will begin."""
        return self._clock + STEP_CLOCK

    # --- a step

    @property
    def generation(self) -> int:
        """The last generation that was submitted; waits for a commit that is under way."""
        if self._pending is not None:
            return self._pending.generation
        self.finish()
        return self.store.committed.generation if self.store.committed else -1

    def wait(self, unit: int) -> None:
        """Wait for a unit's update; raises what went wrong with the job."""
        pending = self._pending
        if pending is not None and unit in pending.made:
            pending.made[unit].wait()
            self.poll()

    def submit(self, pending: Pending) -> None:
        """Take over submitted jobs: from now on their units are read from their new side."""
        self._pending = pending
        self._clock += STEP_CLOCK
        for unit in pending.made:
            self.sides[unit] = pending.sides[self.units[unit].name]
            self.zero_moments.discard(unit)

    def engine_called(self) -> None:
        """An engine call: what steps after step() has stepped by now."""
        if self._pending is not None and self._pending.late is None:
            self._pending.late = self._capture_late()
        self.poll()

    def poll(self) -> None:
        """Commit if everything is there; never waits, not even for the drive's flush."""
        pending = self._pending
        if pending is None or pending.late is None:
            return
        if all(job.done() for job in pending.jobs):
            _join(self.store, pending)
            self._end_update(pending, beside=self.store.generations.flushes)

    def finish_or_discard(self) -> None:
        """Finish as `finish`, or discard a step whose schedulers have not stepped.

        For the end of a script that may have been stopped between step() and scheduler.step(): what
        it left would be resumed with a schedule that is one step behind.
        """
        pending = self._pending
        if pending is not None and pending.late is None and self._late_moves is not False:
            pending.late = self._capture_late()
            if pending.late["tracked"] and not _has_moved(pending):
                _LOG.warning(
                    "close: step to generation %d is discarded, its scheduler has not stepped.",
                    pending.generation,
                )
                self.abandon()
        self.finish()

    def finish(self) -> None:
        """Wait for the pending update and its commit; raises what went wrong with either."""
        pending = self._pending
        if pending is not None:
            _join(self.store, pending)
            self._end_update(pending, beside=False)
        if self._commit is not None:
            self._commit.result()
            self._commit = None

    def _end_update(self, pending: Pending, *, beside: bool) -> None:
        """Close the jobs, which have ended, and commit; `beside`: on a thread of its own."""
        if pending.late is None:
            pending.late = self._capture_late()
        error = _not_finite(pending)
        if error is not None:
            self.store.poison(error)
            self.abandon()
            raise error
        self._late_moves = self._late_moves is not False and _has_moved(pending)
        payload = encode(with_late(pending.state, pending.late))

        def commit() -> None:
            checksums = _seal(self, pending, self.units)
            for job in pending.jobs:
                job.close()
            self.store.commit(
                sides=pending.sides, generation=pending.generation, payload=payload,
                checksums=checksums,
            )  # fmt: skip

        for job in pending.jobs:
            account(job, self.metrics)
        with uninterrupted():
            self._pending = None
            if beside:
                self._commit = run_beside(commit)
            else:
                commit()

    def abandon(self) -> None:
        """Cancel the pending update: the committed generation stays the last one."""
        if self._pending is not None:
            for job in self._pending.jobs:
                job.close()
            self._pending = None
        if self._commit is not None:
            self._commit.exception()  # nobody may close the store under it
            self._commit = None


def _has_moved(pending: Pending) -> bool:
    """True when something tracked has changed between step() and the next engine call."""
    late, before = (pending.late or {})["tracked"], pending.state["tracked"]
    return not is_same(late, {name: before.get(name) for name in late})


def run_beside(action: Callable[[], None]) -> Future[None]:
    """Run `action` on a thread of its own; the future has its error."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="commit").start()
    return future


def account(job: Job, metrics: Metrics) -> None:
    """Count the bytes that a finished job moved."""
    stats = job.stats
    for role, num_bytes in stats.read_bytes.items():
        metrics.read_bytes[f"update.{role.value}"] += num_bytes
    for role, num_bytes in stats.write_bytes.items():
        metrics.write_bytes[f"update.{role.value}"] += num_bytes
    metrics.seconds["kernel"] += stats.kernel_s


def _not_finite(pending: Pending) -> StateError | None:
    """A weight that became Inf or NaN is an error of the step (DESIGN T2)."""
    if not any(job.stats.num_nonfinite for job in pending.jobs):
        return None
    return StateError(
        f"step to generation {pending.generation}: expected finite weights, got Inf or NaN"
        " in some. The generation before it is intact: lower the learning rate and resume."
    )


def _join(store: Store, pending: Pending) -> None:
    """Wait for all jobs.  One that failed stays pending: whoever asks later is told again."""
    try:
        for job in pending.jobs:
            job.wait()
    except StoreError as error:
        store.poison(error)
        raise


def _seal(ledger: Ledger, pending: Pending, units: Mapping[int, Unit]) -> dict[str, int]:
    """Fill the checksum extents of what was written."""
    try:
        return {
            name: ledger.sealer.seal_update(
                units[index], pending.sides[name], made.job, made.number
            )
            for index, made in pending.made.items()
            if (name := units[index].name)
        }
    except OSError as error:
        ledger.store.poison(error)
        raise StoreError(
            f"generation {pending.generation}: its checksums cannot be written: {error}."
            " The generation before it is intact: remove the cause and resume from it."
        ) from error
