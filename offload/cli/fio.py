"""fio on a file that exists: what a drive gives to a tool that does nothing else.

The same file and offsets as `io_sweep`: `mixed` reads the first half while a second job writes the
other.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Timing:
    """One run of one operation."""

    num_bytes: int
    seconds: float
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.num_bytes / 2**30)


@dataclass(frozen=True)
class FioSetting:
    """How fio does it."""

    engine: str
    block_bytes: int
    depth: int  # of each job: `mixed` has two
    fixed: bool = False  # registered buffers

    @property
    def name(self) -> str:
        block = f"{self.block_bytes >> 20}M"
        return f"fio {self.engine}{' fixed' if self.fixed else ''} {block} x {self.depth}"


def installed() -> bool:
    return shutil.which("fio") is not None


def has_huge_pages(num_bytes: int) -> bool:
    """Whether fio can have its buffers on huge pages; with ordinary ones it is slower."""
    try:
        fields = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        free, size = int(fields["HugePages_Free"]), int(fields["Hugepagesize"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return False
    return free * size >= num_bytes


def run_fio(
    path: Path,
    operation: str,
    setting: FioSetting,
    *,
    num_bytes: int,
    huge: bool,
    seconds: float | None = None,
) -> Timing:
    """Go through the file once, or round and round for `seconds`; raises RuntimeError."""
    common = [
        "fio", f"--filename={path}", f"--bs={setting.block_bytes}", f"--iodepth={setting.depth}",
        f"--ioengine={setting.engine}", "--direct=1", "--thread", "--fallocate=none",
        "--overwrite=1", "--scramble_buffers=0", "--allow_file_create=0", "--output-format=json",
        *(["--iomem=mmaphuge"] if huge else []), *(["--fixedbufs=1"] if setting.fixed else []),
        *([] if seconds is None else ["--time_based", f"--runtime={seconds}"]),
    ]  # fmt: skip
    # What stands before the first --name holds for every job.
    done = subprocess.run(
        [*common, *_jobs(operation, num_bytes)], capture_output=True, text=True, check=False
    )
    start = done.stdout.find("{")
    if done.returncode or start < 0:
        raise RuntimeError(f"{setting.name}, {operation}: {done.stderr or done.stdout[:start]}")
    return timing_of(json.loads(done.stdout[start:])["jobs"])


def _jobs(operation: str, num_bytes: int) -> list[str]:
    half = num_bytes // 2
    return {
        "read": ["--name=r", "--rw=read", f"--size={num_bytes}"],
        "write": ["--name=w", "--rw=write", f"--size={num_bytes}"],
        "mixed": [
            "--name=r", "--rw=read", f"--size={half}",
            "--name=w", "--rw=write", f"--offset={half}", f"--size={half}",
        ],
    }[operation]  # fmt: skip


def timing_of(jobs: Sequence[Mapping[str, Any]]) -> Timing:
    """Bytes and CPU time of all jobs, seconds of the longest."""
    moved, longest, cpu_s = 0, 0.0, 0.0
    for job in jobs:
        sides = [job["read"], job["write"]]
        run_s = max(float(side["runtime"]) for side in sides) / 1e3
        moved += sum(int(side["io_bytes"]) for side in sides)
        longest = max(longest, run_s)
        busy = float(job["usr_cpu"]) + float(job["sys_cpu"])
        cpu_s += busy / 100 * float(job["job_runtime"]) / 1e3
    return Timing(moved, longest, cpu_s)
