"""Where the account of each step goes: a file with a line a step, and the log."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from offload.errors import ConfigError

_LOG = logging.getLogger(__name__)
_TIMERS = {"forward": "fwd", "backward": "bwd", "step": "step"}


class MetricsFile:
    """`metrics_path`: one JSON object a step, as `Metrics.last` has it."""

    def __init__(self, path: Path, *, go_on: bool) -> None:
        """`go_on`: keep what a run that is resumed has written; raises ConfigError.

        A step that is made again after a crash has two lines: the later one counts.
        """
        self.path = path
        try:
            self._file: TextIO | None = path.open("a" if go_on else "w")
        except OSError as error:
            raise ConfigError(
                f"metrics_path {path}: expected a file that can be written, got {error.strerror}."
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        """Add a line.  A file that cannot be written ends, told once; training goes on."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_rounded(record)) + "\n")
            self._file.flush()
        except OSError as error:
            _LOG.warning("%s ends before step %d: %s.", self.path, record["step"], error.strerror)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class WallClock:
    """`wall_clock_breakdown`: DeepSpeed's line of timers, means over `every` steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._sums: Counter[str] = Counter()
        self._num_steps = 0

    def write(self, record: dict[str, Any]) -> None:
        """Count a step; every so often, log."""
        self._num_steps += 1
        for phase, spent in record["seconds"].items():
            self._sums[phase] += spent
        if self._num_steps % self._every == 0:
            timers = " | ".join(
                f"{name}: {1e3 * self._sums[phase] / self._every:.2f}"
                for phase, name in _TIMERS.items()
            )
            _LOG.info(
                "step %d, time (ms) | %s | %s",
                record["step"], timers, record["bound"]["sentence"],
            )  # fmt: skip
            self._sums.clear()


def _rounded(value: Any) -> Any:
    """Microseconds are enough."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 6) if isinstance(value, float) else value
