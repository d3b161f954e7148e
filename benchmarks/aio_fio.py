"""fio with its buffers on huge pages: what a drive gives to a tool that does nothing else.

The same file and offsets as ours: `mixed` reads the first half while a second job writes the other.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
MEMORY = Path("/proc/meminfo")
NUM_HUGE_PAGES = 160  # 2 MiB each


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
    engine: str
    block_bytes: int
    depth: int
    fixed: bool = False  # registered buffers

    @property
    def name(self) -> str:
        block = f"{self.block_bytes >> 20}M"
        return f"fio {self.engine}{' fixed' if self.fixed else ''} {block} x {self.depth}"


@contextmanager
def huge_pages() -> Iterator[bool]:
    """Reserve huge pages (root); False: fio must do with ordinary ones, and is a straw man."""
    before = HUGE_PAGES.read_text()
    try:
        yield _top_up()
    finally:
        if os.access(HUGE_PAGES, os.W_OK):
            HUGE_PAGES.write_text(before)


def _top_up() -> bool:
    """Make NUM_HUGE_PAGES free ones; other processes take some whenever there are any."""
    fields = dict(line.split(":") for line in MEMORY.read_text().splitlines())
    total, free = (int(fields[f"HugePages_{key}"]) for key in ("Total", "Free"))
    if free < NUM_HUGE_PAGES and os.access(HUGE_PAGES, os.W_OK):
        HUGE_PAGES.write_text(str(total - free + NUM_HUGE_PAGES))
        free = NUM_HUGE_PAGES
    return free >= NUM_HUGE_PAGES


def run_fio(
    path: Path, operation: str, setting: FioSetting, *, num_bytes: int, huge: bool
) -> Timing:
    """Go once through the file."""
    common = [
        "fio", f"--filename={path}", f"--bs={setting.block_bytes}", f"--iodepth={setting.depth}",
        f"--ioengine={setting.engine}", "--direct=1", "--thread", "--fallocate=none",
        "--overwrite=1", "--scramble_buffers=0", "--allow_file_create=0", "--output-format=json",
        *(["--iomem=mmaphuge"] if huge else []), *(["--fixedbufs=1"] if setting.fixed else []),
    ]  # fmt: skip
    half = num_bytes // 2
    jobs = {
        "read": ["--name=r", "--rw=read", f"--size={num_bytes}"],
        "write": ["--name=w", "--rw=write", f"--size={num_bytes}"],
        "mixed": [
            "--name=r", "--rw=read", f"--size={half}",
            "--name=w", "--rw=write", f"--offset={half}", f"--size={half}",
        ],
    }[operation]  # fmt: skip
    if huge:
        _top_up()
    # What stands before the first --name holds for every job.
    done = subprocess.run([*common, *jobs], capture_output=True, text=True, check=False)
    start = done.stdout.find("{")
    if done.returncode or start < 0:
        raise RuntimeError(f"{setting.name}, {operation}: {done.stderr or done.stdout[:start]}")
    return timing_of(json.loads(done.stdout[start:])["jobs"])


def timing_of(jobs: list[dict[str, object]]) -> Timing:
    moved, longest, cpu_s = 0, 0.0, 0.0
    for job in jobs:
        sides = [job["read"], job["write"]]
        run_s = max(float(side["runtime"]) for side in sides) / 1e3  # type: ignore[index]
        moved += sum(int(side["io_bytes"]) for side in sides)  # type: ignore[index]
        longest = max(longest, run_s)
        busy = float(job["usr_cpu"]) + float(job["sys_cpu"])  # type: ignore[arg-type]
        cpu_s += busy / 100 * float(job["job_runtime"]) / 1e3  # type: ignore[arg-type]
    return Timing(moved, longest, cpu_s)
