"""A hard limit on the memory of a process and its children: beyond it the kernel kills them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LIMITS = ("memory.limit_in_bytes", "memory.max")


@contextmanager
def capped_group(num_bytes: int) -> Iterator[Path]:
    """A memory cgroup, version 1 or 2; its members must have ended at the end."""
    for root, limit in zip(ROOTS, LIMITS, strict=True):
        group = root / f"offload-bench-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
        if (group / limit).exists():
            (group / limit).write_text(str(num_bytes))
            try:
                yield group
            finally:
                group.rmdir()
            return
    raise click.ClickException("no memory cgroup can be made here: run as root")


def joining(group: Path) -> Callable[[], None]:
    """For `preexec_fn`: the child joins the group before it runs anything."""

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return join
