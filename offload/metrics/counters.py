"""The counters of an engine: bytes by phase and role, seconds by phase, stalls by cause.

    enter("forward") ... enter("backward") ... enter("outside") ...     a clock that never stops:
                                                                        the phases add up to the run
    with stall("weights"): ticket.wait()      ->  stalls["forward.weights"]
    close_step(n)                             ->  last: the account of step n

Hooks and step() count, one at a time; reading is free at any time.  `last` and the lines of
`metrics_path` have the same names:

    step, total_s, skipped           number, wall time since the previous step, steps skipped in it
    seconds                          by phase: forward, backward, step, eval, outside (the script)
    stalls                           seconds by "phase.cause": weights, update, commit, spill,
                                     gradients (beside a GPU)
    busy                             seconds: disk_read, disk_write, update, checksum, fill, cpu
    disk                             bytes through the queue: read, written
    read_bytes, write_bytes          by "phase.role"; read_total, write_total: their sums;
                                     phase save: what only memory held, at close, checkpoint, export
    bound                            terms, seconds, by, ratio; rates, rates_from, sentence

An update's bytes belong to the step in which it is seen to have ended: normally the next one.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from offload.metrics.bound import Machine
from offload.metrics.steps import Probe, Steps
from offload.metrics.timeline import Timeline

LEAST_SHOWN_NS = 20_000  # shorter stalls are counted and not shown
OUTSIDE = "outside"  # forward, backward and step: the script's own time


class Metrics:
    """Counters of a run.  `last` is the account of the last finished step."""

    def __init__(self) -> None:
        self.read_bytes: Counter[str] = Counter()  # by "phase.role", since the engine was made
        self.write_bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(
            float
        )  # by phase; and of update, checksum, fill
        self.stalls: defaultdict[str, float] = defaultdict(float)  # seconds by "phase.cause"
        self.fetches: Counter[str] = Counter()  # by unit: DISK -> DEVICE
        self.evictions: Counter[str] = Counter()
        self.hits = 0  # fetches whose reads had been submitted before they were asked for
        self.skipped_steps = 0
        self.timeline: Timeline | None = None
        self._phase, self._since = OUTSIDE, time.perf_counter_ns()
        self._steps: Steps | None = None

    @property
    def last(self) -> dict[str, Any]:
        """The account of the last finished step; empty before."""
        return self._steps.last if self._steps else {}

    @property
    def total_read_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def total_write_bytes(self) -> int:
        return sum(self.write_bytes.values())

    def start(
        self, machine: Machine, probe: Probe, *,
        sinks: list[Callable[[dict[str, Any]], None]], timeline: Timeline | None,
    ) -> None:  # fmt: skip
        """The engine is ready: the first step begins now.  `sinks` get the account of each step."""
        self.timeline = timeline
        self._phase, self._since = OUTSIDE, time.perf_counter_ns()
        self.seconds.clear()
        self.stalls.clear()
        self._steps = Steps(machine, probe, sinks, self._snapshot())

    def enter(self, phase: str) -> None:
        """From now on time is spent in `phase`."""
        now = time.perf_counter_ns()
        self.seconds[self._phase] += (now - self._since) * 1e-9
        if self.timeline is not None:
            self.timeline.phase(self._phase, self._since, now)
        self._phase, self._since = phase, now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Spend the block in `name`, then go on with what was before."""
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def stall(self, cause: str, of: str = "") -> Iterator[None]:
        """The block waits; `of` names for what, in the timeline."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            now = time.perf_counter_ns()
            self.stalls[f"{self._phase}.{cause}"] += (now - start) * 1e-9
            if self.timeline is not None and now - start >= LEAST_SHOWN_NS:
                self.timeline.span("stalls", f"{cause} {of}".strip(), start, now)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.seconds[name] += (time.perf_counter_ns() - start) * 1e-9

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Show the block in the timeline, if there is one; any thread."""
        start = time.perf_counter_ns() if self.timeline is not None else 0
        try:
            yield
        finally:
            if self.timeline is not None:
                self.timeline.span(lane, name, start, time.perf_counter_ns())

    def reach(self, unit: str) -> None:
        """Compute is at `unit` now."""
        if self.timeline is not None and self._steps is not None:
            self.timeline.reach(unit)
            self.timeline.flows(*self._steps.probe())

    def close_step(self, step: int) -> None:
        """Make `last` what has changed since the previous call, and tell whoever listens."""
        self.enter(self._phase)
        if self._steps is not None:
            self._steps.close(step, self._snapshot())
        if self.timeline is not None:
            self.timeline.step(step, self._since)

    def report(self) -> str:
        """The last step for people, in a few lines; DESIGN P1 tells what the bound is."""
        return self._steps.report() if self._steps else "no step yet"

    def short(self) -> str:
        """The same in a few words, for a progress bar."""
        return self._steps.short() if self._steps else ""

    def _snapshot(self) -> dict[str, dict[str, float]]:
        return {
            "read_bytes": dict(self.read_bytes),
            "write_bytes": dict(self.write_bytes),
            "seconds": dict(self.seconds),
            "stalls": dict(self.stalls),
            "skipped": {"steps": self.skipped_steps},
        }
