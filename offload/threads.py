"""How many threads this process may use: explicit, never "all cores" by accident (DESIGN P4)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path


def available_cpus(environment: Mapping[str, str] = os.environ) -> int:
    """CPUs of this process: affinity, cgroup quota, and its share among the ranks of one machine.

    OMP_NUM_THREADS is not consulted: torchrun sets it to 1.
    """
    cpus = float(len(os.sched_getaffinity(0)))
    quota = _cgroup_quota()
    if quota is not None:
        cpus = min(cpus, quota)
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(1, math.ceil(cpus / max(1, ranks)))


def _cgroup_quota() -> float | None:
    """CPUs that the cgroup allows, or None for no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limit = _read(Path("/sys/fs/cgroup") / path.lstrip("/") / "cpu.max")
            quota, period = limit[0:2] if len(limit) >= 2 else ("max", "1")
        elif "cpu" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/cpu") / path.lstrip("/")
            quota = (_read(folder / "cpu.cfs_quota_us") or ["-1"])[0]
            period = (_read(folder / "cpu.cfs_period_us") or ["100000"])[0]
        else:
            continue
        if quota not in ("max", "-1"):
            return max(float(quota) / float(period), 0.01)
    return None


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
