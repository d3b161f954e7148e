"""How many threads this process may use: explicit, never "all cores" by accident (DESIGN P4).

    usable = min(affinity, cgroup quota) / ranks of this machine                 at least one
    fill   = usable             conversions, on the thread that waits for them
    update = usable             beside a GPU, or when nothing else computes
           = usable - 1, niced  beside a backward pass on the same processors: it yields to it

OMP_NUM_THREADS is not consulted: torchrun sets it to 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from typing import TypeVar

from offload.errors import ConfigError

BESIDE_COMPUTE_NICE = 5
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Processors:
    """What this process may compute with."""

    affinity: frozenset[int]
    quota: float | None  # processors that the cgroup allows; None: no limit
    ranks: int  # processes of one job on this machine

    @classmethod
    def here(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        process: Path = Path("/proc/self/cgroup"),
        root: Path = Path("/sys/fs/cgroup"),
    ) -> Processors:
        """Ask the system; `process` and `root` are where it tells about cgroups."""
        ranks = environment.get("LOCAL_WORLD_SIZE", "1")
        return cls(
            frozenset(os.sched_getaffinity(0)),
            cgroup_quota(process, root),
            max(1, int(ranks)) if ranks.isdecimal() else 1,
        )

    @property
    def usable(self) -> int:
        """Threads that have a processor, in this process's share; at least one."""
        cpus = len(self.affinity)
        if self.quota is not None:
            cpus = min(cpus, math.ceil(self.quota))
        return max(1, cpus // self.ranks)

    def __str__(self) -> str:
        limits = [f"{len(self.affinity)} processors"]
        if self.quota is not None:
            limits.append(f"a quota of {self.quota:g}")
        if self.ranks > 1:
            limits.append(f"{self.ranks} ranks")
        return ", ".join(limits)


@dataclass(frozen=True)
class ThreadPlan:
    """The threads of an engine."""

    fill: int
    update: int
    update_cpus: tuple[int, ...]  # that the update's threads are pinned to; empty: not pinned
    update_nice: int  # added to their niceness

    def apart(self, make: Callable[[], _Made]) -> _Made:
        """Call `make` so that threads that it starts have the update's niceness and processors.

        Threads inherit both from the one that starts them, and niceness cannot be taken back, so a
        thread of its own starts them.
        """

        def prepared() -> _Made:
            self.settle()
            return make()

        with ThreadPoolExecutor(1, "update-start") as thread:
            return thread.submit(prepared).result()

    def settle(self) -> None:
        """Give the calling thread the update's niceness and processors."""
        if self.update_cpus:
            os.sched_setaffinity(0, self.update_cpus)
        if self.update_nice:
            thread = get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread) + self.update_nice
            os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))


def plan_threads(
    processors: Processors, *, beside_compute: bool,
    update_threads: int | None = None, update_cpus: tuple[int, ...] = (),
) -> ThreadPlan:  # fmt: skip
    """Share out the processors; what the user says holds.

    `beside_compute`: updates run while the model computes on the same processors.
    """
    outside = sorted(set(update_cpus) - processors.affinity)
    if outside:
        raise ConfigError(
            f"update_cpus: expected processors of this process, got {outside[0]}, which is not one"
            f" of {sorted(processors.affinity)}. Leave it out."
        )
    usable = processors.usable
    count = update_threads or len(update_cpus)
    if not count:
        count = max(1, usable - 1) if beside_compute else usable
    return ThreadPlan(usable, count, update_cpus, BESIDE_COMPUTE_NICE if beside_compute else 0)


def available_cpus(environment: Mapping[str, str] = os.environ) -> int:
    """CPUs of this process: affinity, cgroup quota, its share among the ranks of one machine."""
    return Processors.here(environment).usable


def cgroup_quota(process: Path, root: Path) -> float | None:
    """CPUs that the cgroup and those above it allow, or None for no limit.

    `process`: a file as /proc/self/cgroup; `root`: where version 2, or the `cpu` controller of
    version 1, is mounted.
    """
    quotas = []
    for line in _lines(process):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            quotas += [_quota_v2(folder) for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_v1(folder) for folder in _upwards(root / "cpu", path)]
    limits = [quota for quota in quotas if quota is not None]
    return min(limits, default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it; inside a container only the mount may exist."""
    own = mount / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(mount)]


def _quota_v2(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")).split()
    return float(words[0]) / float(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = ("".join(_lines(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    if not quota or not period or float(quota) <= 0:
        return None
    return float(quota) / float(period)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
