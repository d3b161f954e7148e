"""What a queue has moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flow:
    """One direction.  The last three are 0 unless the queue was opened with `keep_stats`."""

    num_bytes: int
    num_blocks: int  # ended, with or without an error
    latency: tuple[int, ...]  # blocks that took [2^i, 2^(i+1)) us; the ends are open
    busy_s: float  # with at least one block in flight
    mean_depth: float  # blocks in flight while busy


@dataclass(frozen=True, slots=True)
class Stats:
    """An answer of Queue.stats()."""

    read: Flow
    write: Flow


def flow_of(
    native: Any,  # aio_stats *
    op: int,
) -> Flow:
    """The part of `native` that is about `op`."""
    busy_ns = native.busy_ns[op]
    return Flow(
        num_bytes=native.bytes[op],
        num_blocks=native.blocks[op],
        latency=tuple(native.latency[op]),
        busy_s=busy_ns * 1e-9,
        mean_depth=native.depth_ns[op] / busy_ns if busy_ns else 0.0,
    )
