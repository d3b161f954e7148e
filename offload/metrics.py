"""What an engine did: bytes by tier and role, fetches, seconds by phase.  Plain counters, one owner each step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Metrics:
    """Counters of a run.  `last` is the account of the last finished step."""

    def __init__(self) -> None:
        self.read_bytes: Counter[str] = Counter()  # by "phase.role", since the engine was made
        self.write_bytes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()  # by phase: forward, backward, step, stall
        self.fetches: Counter[str] = Counter()  # by unit: DISK -> DEVICE
        self.evictions: Counter[str] = Counter()
        self.hits = 0  # fetches whose reads had been submitted before they were asked for
        self.skipped_steps = 0
        self.last: dict[str, Any] = {}
        self._mark = self._snapshot()

    @property
    def total_read_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def total_write_bytes(self) -> int:
        return sum(self.write_bytes.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def close_step(self, step: int) -> None:
        """Make `last` the difference to the previous call."""
        now = self._snapshot()
        self.last = {"step": step}
        for key, counter in now.items():
            self.last[key] = dict(counter - self._mark[key])
        self.last["read_total"] = sum(self.last["read_bytes"].values())
        self.last["write_total"] = sum(self.last["write_bytes"].values())
        self._mark = now

    def _snapshot(self) -> dict[str, Counter[str]]:
        names = ("read_bytes", "write_bytes", "seconds")
        return {name: Counter(getattr(self, name)) for name in names}
