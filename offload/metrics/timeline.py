"""A timeline in the Chrome trace format: open it in Perfetto or chrome://tracing.

    compute   forward, backward, step, eval, outside       stalls   what compute waited for
    units     where compute is in the model                commits  checksums, and the record
    fetches   a unit's weights: submitted ... in place     updates  a unit's: submitted ... written
    disk reads, kernels, disk writes   of an update, from the first to the last of a unit
    drives    bytes per second of all traffic, between two units of compute

Spans that overlap in a lane get rows of their own.  Every event is written when it ends, so memory
is bounded, and a file without its end can still be opened.  Times are CLOCK_MONOTONIC's, which C
reads too.  Any thread may add.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from offload.errors import ConfigError
from offload.metrics.bound import Flow

LANES = (
    *("compute", "units", "stalls", "fetches", "updates", "kernels", "disk reads", "disk writes"),
    "commits",
)
_MAX_ROWS = 32  # of a lane; then spans lie over each other in the last one
_LOG = logging.getLogger(__name__)


class Timeline:
    """Writes one file; closed by the engine."""

    def __init__(self, path: Path) -> None:
        """Begin the file; raises ConfigError where it cannot be written."""
        self.path = path
        self._lock = threading.Lock()  # guards all that follows
        try:
            self._file: TextIO | None = path.open("w", buffering=1 << 16)
        except OSError as error:
            raise ConfigError(
                f"timeline_path {path}: expected a file that can be written, got {error.strerror}."
            ) from error
        self._origin = time.perf_counter_ns()
        self._flows = (self._origin, 0, 0)  # when they were asked for, bytes read, bytes written
        self._rows: dict[str, list[int]] = {lane: [] for lane in LANES}  # the end of each row
        self._unit: tuple[str, int] | None = None  # where compute is, and since when
        name = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": "offload"}}
        self._file.write("[\n" + json.dumps(name))

    def span(self, lane: str, name: str, start_ns: int, stop_ns: int, **args: Any) -> None:
        """Add what lasted from `start_ns` to `stop_ns`."""
        with self._lock:
            row = self._row(lane, start_ns, stop_ns)
            event = {
                "name": name, "ph": "X", "pid": os.getpid(), "tid": row,
                "ts": (start_ns - self._origin) / 1000, "dur": (stop_ns - start_ns) / 1000,
            }  # fmt: skip
            self._write({**event, "args": args} if args else event)

    def phase(self, name: str, start_ns: int, stop_ns: int) -> None:
        """Compute leaves a phase, and the unit in which it was."""
        self.reach(None, stop_ns)
        self.span("compute", name, start_ns, stop_ns)

    def reach(self, unit: str | None, now_ns: int | None = None) -> None:
        """Compute is at `unit` from now on."""
        now_ns = time.perf_counter_ns() if now_ns is None else now_ns
        before, self._unit = self._unit, (unit, now_ns) if unit is not None else None
        if before is not None:
            self.span("units", before[0], before[1], now_ns)

    def flows(self, read: Flow, write: Flow) -> None:
        """Show how fast the drives have moved bytes since the previous call."""
        now_ns = time.perf_counter_ns()
        with self._lock:
            before_ns, bytes_read, bytes_written = self._flows
            self._flows = (now_ns, read.num_bytes, write.num_bytes)
            passed_ns = max(now_ns - before_ns, 1)
            rates = {
                "read": (read.num_bytes - bytes_read) / passed_ns,
                "written": (write.num_bytes - bytes_written) / passed_ns,
            }
            self._write(
                {
                    "name": "drives, GB/s", "ph": "C", "pid": os.getpid(),
                    "ts": (before_ns - self._origin) / 1000, "args": rates,
                }
            )  # fmt: skip

    def step(self, number: int, now_ns: int) -> None:
        """Mark the end of a step; what came before is on disk."""
        with self._lock:
            self._write(
                {
                    "name": f"step {number}", "ph": "i", "s": "p", "pid": os.getpid(),
                    "tid": 100 * LANES.index("compute"), "ts": (now_ns - self._origin) / 1000,
                }
            )  # fmt: skip
            self._guarded(lambda file: file.flush())

    def close(self) -> None:
        """End the file; may be called twice."""
        with self._lock:
            self._guarded(lambda file: file.write("\n]\n"))
            self._guarded(lambda file: file.close())
            self._file = None

    # --- under the lock

    def _row(self, lane: str, start_ns: int, stop_ns: int) -> int:
        """A row of the lane that is free at `start_ns`; the first span of one names it."""
        rows = self._rows[lane]
        free = [row for row, end in enumerate(rows) if end <= start_ns]
        if free or len(rows) == _MAX_ROWS:
            row = free[0] if free else _MAX_ROWS - 1
            rows[row] = max(rows[row], stop_ns)
        else:
            row = len(rows)
            rows.append(stop_ns)
            self._name(lane, row)
        return 100 * LANES.index(lane) + row

    def _name(self, lane: str, row: int) -> None:
        tid = 100 * LANES.index(lane) + row
        for kind, value in (
            ("thread_name", {"name": f"{lane} {row + 1}" if row else lane}),
            ("thread_sort_index", {"sort_index": tid}),
        ):
            self._write({"name": kind, "ph": "M", "pid": os.getpid(), "tid": tid, "args": value})

    def _write(self, event: dict[str, Any]) -> None:
        text = ",\n" + json.dumps(event)
        self._guarded(lambda file: file.write(text))

    def _guarded(self, action: Any) -> None:
        """A timeline that cannot be written ends; training goes on."""
        if self._file is None:
            return
        try:
            action(self._file)
        except OSError as error:
            _LOG.warning("timeline %s ends here: %s.", self.path, error.strerror)
            self._file = None
