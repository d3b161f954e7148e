"""Where the current generation of each unit is, and the update that is making the next one.

    committed --submit(job)--> pending: updated units read from the other side, each as soon as it
    is written pending --job ended and late state captured--> commit --> committed

One step is pending at most: its successor's first write waits for the commit (DESIGN D7).
A commit that flushes, and one that a checkpoint waits for, runs on a thread of its own behind the
next forward; the step stays pending until this thread has seen its end (`poll`, `finish`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from offload.engine.generation import encode, is_same, with_late
from offload.engine.interrupts import uninterrupted
from offload.engine.measuring import show_update
from offload.engine.sealing import Sealer
from offload.engine.write_back import WriteBack
from offload.errors import StateError, StoreError
from offload.metrics import Metrics
from offload.optim.jobs import Job
from offload.partition.unit import Role, Unit
from offload.store.files import Extent
from offload.store.format import Record, UnitFlag
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

    def wait(self, *, made: bool = False) -> None:
        self.job.wait(self.number, made=made)


@dataclass
class Pending:
    """A submitted update and what its commit will say."""

    made: Mapping[int, Made]  # by unit
    sides: dict[str, int]
    generation: int
    state: dict[str, Any]  # captured when step() returned
    late: dict[str, Any] | None = None  # what steps after step(), captured at the next engine call
    commit: Future[Record] | None = None  # begun; it closes nothing, this thread does

    @property
    def jobs(self) -> list[Job]:
        """Each job once."""
        return list({id(made.job): made.job for made in self.made.values()}.values())


class Ledger:
    """Sides and generations of all units; implements the fetcher's Source."""

    def __init__(
        self, store: Store, units: Mapping[int, Unit], metrics: Metrics, *,
        capture_late: Callable[[], dict[str, Any]], write_back: WriteBack,
    ) -> None:  # fmt: skip
        self.store = store
        self.units = units
        self.metrics = metrics
        self._capture_late = capture_late
        self.sealer = Sealer(store)
        self.write_back = write_back
        self._pending: Pending | None = None
        self.zero_moments: set[int] = set(units)  # units whose moments were never written
        self.sides = dict.fromkeys(units, 0)
        self.lost: Callable[[Collection[int]], None] = lambda units: None  # of memory: see abandon
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
        """The last generation that was submitted."""
        if self._pending is not None:
            return self._pending.generation
        return self.store.committed.generation if self.store.committed else -1

    def wait(self, unit: int, *, made: bool = False) -> None:
        """Wait for a unit's update; raises what went wrong with the job.

        `made`: until what stays in memory of the unit is its next generation, which may still be on
        its way to the store.
        """
        pending = self._pending
        if pending is not None and unit in pending.made:
            with self.metrics.stall("update", self.units[unit].name):
                pending.made[unit].wait(made=made)
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
        if pending.commit is not None:
            ended = pending.commit.done()
        else:
            ended = all(job.done() for job in pending.jobs)
            if ended and self.store.generations.flushes:
                _begin_commit(self, pending, run_beside)
                return
        if ended:
            self.finish()

    def committing(self) -> Future[Record]:
        """The record of the last step, which is committed without any further call.

        What steps after step() is captured now.  Raises what went wrong so far.  What steps leave
        in memory is written first.
        """
        self.engine_called()
        if self.write_back.active:
            self.finish()
            self.write_back.write()
        pending = self._pending
        if pending is None:
            return run_here(lambda: _committed(self.store))
        if pending.commit is None:
            _begin_commit(self, pending, run_beside)
        assert pending.commit is not None
        return pending.commit

    def finish_or_discard(self) -> None:
        """Finish as `finish`, or discard a step whose schedulers have not stepped.

        For the end of a script that may have been stopped between step() and scheduler.step(): what
        it left would be resumed with a schedule that is one step behind.  A store with one side has
        nothing to go back to: such a step is kept there.
        """
        pending = self._pending
        if pending is not None and pending.late is None and self._late_moves is not False:
            pending.late = self._capture_late()
            if pending.late["tracked"] and not _has_moved(pending):
                _end_unscheduled(self, pending)
        self.finish()
        self.write_back.write()

    def finish(self) -> None:
        """Wait for the pending update and its commit; raises what went wrong with either."""
        pending = self._pending
        if pending is None:
            return
        with self.metrics.stall("update"):
            _join(self.store, pending)
        if pending.late is None:
            pending.late = self._capture_late()
        with self.metrics.stall("commit"):
            if pending.commit is None:
                with uninterrupted():
                    _begin_commit(self, pending, run_here)
            assert pending.commit is not None
            error = pending.commit.exception()
        if error is not None:
            self.abandon()
            raise error
        with uninterrupted():
            self._late_moves = self._late_moves is not False and _has_moved(pending)
            self._pending = None
            for job in pending.jobs:
                account(job, self.metrics)
                job.close()

    def abandon(self) -> None:
        """Cancel the pending update, unless its commit has begun: wait for that.

        Readers go back to what is committed; `lost(units)` tells memory that it holds the step.
        """
        pending = self._pending
        if pending is not None:
            if pending.commit is not None:
                pending.commit.exception()  # nobody may close jobs or store under it
            for job in pending.jobs:
                job.close()
            self._pending = None
            self.write_back.give_up()
            if self.store.manifest.num_sides > 1:
                follow(self, _committed(self.store), pending.made)
                self.lost(pending.made.keys())


def follow(ledger: Ledger, record: Record, units: Iterable[int]) -> None:
    """Take sides and flags of `units` from a committed generation."""
    for unit in units:
        name = ledger.units[unit].name
        ledger.sides[unit] = record.sides[name]
        ledger.zero_moments.discard(unit)
        if record.flags[name] & UnitFlag.MOMENTS_ZERO:
            ledger.zero_moments.add(unit)


def _end_unscheduled(ledger: Ledger, pending: Pending) -> None:
    """Discard a step whose schedulers have not stepped, where there is one before it."""
    if ledger.store.manifest.num_sides == 1:
        _LOG.warning(
            "close: step to generation %d is kept, its scheduler has not stepped: a resumed one is"
            " one step behind.", pending.generation,
        )  # fmt: skip
        return
    _LOG.warning(
        "close: step to generation %d is discarded, its scheduler has not stepped.",
        pending.generation,
    )
    ledger.abandon()


def _begin_commit(
    ledger: Ledger, pending: Pending,
    run: Callable[[Callable[[], Record]], Future[Record]],
) -> None:  # fmt: skip
    """Commit `pending` through `run` when its jobs have ended; its late state is captured."""
    assert pending.late is not None
    payload = encode(with_late(pending.state, pending.late))  # now: what it names may move on

    def commit() -> Record:
        _join(ledger.store, pending)
        error = _not_finite(pending, in_memory=ledger.write_back.active)
        if error is not None:
            ledger.store.poison(error)
            raise error
        if ledger.write_back.active:
            sums = {
                unit: ledger.sealer.sums_of(ledger.units[unit], made.job, made.number)
                for unit, made in pending.made.items()
            }
            return ledger.write_back.remember(pending.generation, payload, sums)
        with ledger.metrics.span("commits", f"generation {pending.generation}"):
            checksums = _seal(ledger, pending, ledger.units)
            return ledger.store.commit(
                sides=pending.sides, generation=pending.generation, payload=payload,
                checksums=checksums,
            )  # fmt: skip

    pending.commit = run(commit)


def _committed(store: Store) -> Record:
    record = store.committed
    assert record is not None
    return record


def _has_moved(pending: Pending) -> bool:
    """True when something tracked has changed between step() and the next engine call."""
    late, before = (pending.late or {})["tracked"], pending.state["tracked"]
    return not is_same(late, {name: before.get(name) for name in late})


def run_here(action: Callable[[], Record]) -> Future[Record]:
    """Run `action`; the future has ended, with its result or error."""
    future: Future[Record] = Future()
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
    return future


def run_beside(action: Callable[[], Record]) -> Future[Record]:
    """Run `action` on a thread of its own; the future has its result or error."""
    future: Future[Record] = Future()

    def run() -> None:
        try:
            result = action()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="commit").start()
    return future


def account(job: Job, metrics: Metrics) -> None:
    """Count what a job that has ended moved, and the time that it took."""
    stats = job.stats
    for role, num_bytes in stats.read_bytes.items():
        metrics.read_bytes[f"update.{role.value}"] += num_bytes
    for role, num_bytes in stats.write_bytes.items():
        metrics.write_bytes[f"update.{role.value}"] += num_bytes
    metrics.seconds["update"] += stats.kernel_s
    metrics.seconds["checksum"] += stats.checksum_s
    if metrics.timeline is not None:
        show_update(job, metrics.timeline)


def _not_finite(pending: Pending, *, in_memory: bool) -> StateError | None:
    """A weight that became Inf or NaN is an error of the step (DESIGN T2)."""
    if not any(job.stats.num_nonfinite for job in pending.jobs):
        return None
    left = "The generation before it is intact: lower the learning rate and resume."
    if in_memory:
        left = (
            'With durability="none" the generation before it is lost: lower the learning rate, and'
            " resume from the last save or load a checkpoint."
        )
    return StateError(
        f"step to generation {pending.generation}: expected finite weights, got Inf or NaN"
        f" in some. {left}"
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
