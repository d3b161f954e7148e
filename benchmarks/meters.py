"""What the kernel says about a process and the machine: memory, bytes, CPU time, names.

Used by the process that is measured (its own counters, at step borders) and by its parent
(peak memory, which a process cannot sample while it computes). Standard library only.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int | str = "self") -> int:
    """Anonymous, shared and hugetlb memory of a process; file mappings are not counted."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:", "HugetlbPages:")):
            total += int(line.split()[1]) * 1024
    return total


def io_bytes() -> tuple[int, int]:
    """Bytes that this process made the storage layer read and write since it started."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


@dataclass(frozen=True)
class CpuSeconds:
    """CPU time since some start: of this process, of the whole machine, taken by the host."""

    own: float
    machine: float
    steal: float

    @classmethod
    def now(cls) -> CpuSeconds:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
        ticks = [int(field) for field in line.split()[1:]]
        user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
        machine = (user + nice + system + irq + softirq) / _TICKS_PER_S
        return cls(time.process_time(), machine, steal / _TICKS_PER_S)

    def since(self, earlier: CpuSeconds) -> dict[str, float]:
        """Split what passed: `own`, `foreign` (everybody else, kernel threads too), `steal`."""
        own = self.own - earlier.own
        machine = self.machine - earlier.machine
        return {
            "cpu_s": own,
            "foreign_s": max(0.0, machine - own),
            "steal_s": self.steal - earlier.steal,
        }


class MemorySampler:
    """Track the peak of `memory_bytes(pid)` per phase, from a thread of the parent.

    Only the thread writes `peaks`; whoever follows the child's progress sets `phase`.
    """

    PERIOD_S = 0.02

    def __init__(self, pid: int) -> None:
        self.phase = "import"
        self.peaks: dict[str, int] = {}
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            try:
                now = memory_bytes(self._pid)
            except OSError:  # the process is gone
                return
            self.peaks[self.phase] = max(now, self.peaks.get(self.phase, 0))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def num_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def hardware_slug() -> str:
    """A short name for result files: processor family, number of CPUs, best instruction set."""
    words = re.sub(r"\([^)]*\)|processor|cpu|@.*", "", cpu_name().lower()).split()
    flags = Path("/proc/cpuinfo").read_text()
    sets = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
    best = next((name for name in sets if f" {name} " in flags), "")
    parts = [*words[:2], f"{num_cpus()}cpu", best.replace("_", "")]
    return "-".join(part for part in parts if part)


PRIVATE_SETTINGS = (
    *("peer_python", "peer_extensions", "folder", "profile", "as_json", "save", "theme"),
)


def told_settings(settings: Any) -> dict[str, Any]:
    """What a result file keeps of a dataclass of settings: nothing about where things lie."""
    return {key: value for key, value in asdict(settings).items() if key not in PRIVATE_SETTINGS}


def result_path(theme: str, suffix: str) -> Path:
    """Where a result is kept: results/THEME-HARDWARE-MONTH and the suffix."""
    folder = Path(__file__).resolve().parent / "results"
    folder.mkdir(exist_ok=True)
    return folder / f"{theme}-{hardware_slug()}-{datetime.date.today():%Y-%m}{suffix}"


def keep_result(theme: str, result: dict[str, Any]) -> Path:
    """Write a result as JSON; return its file."""
    path = result_path(theme, ".json")
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return path


def describe_machine() -> dict[str, str | int]:
    memory = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    return {
        "cpu": cpu_name(),
        "num_cpus": num_cpus(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
