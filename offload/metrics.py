"""What an engine did: bytes by phase and role, fetches, seconds by phase.  Plain counters."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Metrics:
    """Counters of a run.  `last` is the account of the last finished step."""

    def __init__(self) -> None:
        self.read_bytes: Counter[str] = Counter()  # by "phase.role", since the engine was made
        self.write_bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(
            float
        )  # by phase: forward, backward, step, stall
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
        for key, values in now.items():
            before = self._mark[key]
            self.last[key] = {
                name: value - before.get(name, 0)
                for name, value in values.items()
                if value != before.get(name, 0)
            }
        self.last["read_total"] = sum(self.last["read_bytes"].values())
        self.last["write_total"] = sum(self.last["write_bytes"].values())
        self._mark = now

    def _snapshot(self) -> dict[str, dict[str, float]]:
        return {
            "read_bytes": dict(self.read_bytes),
            "write_bytes": dict(self.write_bytes),
            "seconds": dict(self.seconds),
        }
