"""fio with its buffers on huge pages, reserved as it needs them.

The same file and offsets as ours: `mixed` reads the first half while a second job writes the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.cli import fio
from offload.cli.fio import FioSetting, Timing

__all__ = ["FioSetting", "Timing", "huge_pages", "run_fio"]
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
MEMORY = Path("/proc/meminfo")
NUM_HUGE_PAGES = 160  # 2 MiB each


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
    if huge:
        _top_up()
    return fio.run_fio(path, operation, setting, num_bytes=num_bytes, huge=huge)
