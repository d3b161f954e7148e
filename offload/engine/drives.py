"""The engine's I/O queue and the shares of its drives, as their profiles say or by default."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aio
from offload.config import EngineConfig
from offload.errors import ConfigError
from offload.metrics.bound import Rates
from offload.profile import MAX_DEPTH, Profile, choose

BLOCK_BYTES = 1 << 20
READ_DEPTH = WRITE_DEPTH = 8
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drives:
    """How the queue is opened, and how fast each path is relative to the others."""

    backend: str
    block_bytes: int
    num_drives: int  # each has its own share of the queue
    read_depth: int  # blocks in flight on each drive
    write_depth: int
    rates: tuple[float, ...] | None  # one for each path; None: not all are known
    source: str  # where these numbers are from
    fallback: str | None = None  # instead of a backend that only a profile asks for
    speeds: Rates | None = None  # of all drives together; None: not all are known


def plan_drives(config: EngineConfig) -> Drives:
    """Decide from the profiles that are named or found, and from what the user chose.

    Raises ConfigError.
    """
    planned = _of_profiles(config)
    depth = config.aio_queue_depth
    chosen = replace(
        planned,
        block_bytes=config.aio_block_bytes or planned.block_bytes,
        read_depth=depth or planned.read_depth,
        write_depth=depth or planned.write_depth,
    )
    most = min(MAX_DEPTH, aio.MAX_BLOCKS_IN_FLIGHT // (2 * chosen.num_drives))
    if depth is not None and depth > most:
        raise ConfigError(f"aio_queue_depth: expected at most {most} blocks, got {depth}.")
    return chosen


def _of_profiles(config: EngineConfig) -> Drives:
    profiles = choose(config.profile, config.nvme_path)
    known = [profile for profile in profiles if profile is not None]
    if not known:
        return Drives(
            config.aio_backend, BLOCK_BYTES, _num_drives(profiles), READ_DEPTH, WRITE_DEPTH, None,
            "defaults: no profile",
        )  # fmt: skip
    if len(known) < len(profiles):
        _LOG.info("some paths have no profile: bytes are spread evenly. Run offload-bench io.")
    read_depth = max(profile.read_depth for profile in known)
    write_depth = max(profile.write_depth for profile in known)
    if (read_depth + write_depth) * _num_drives(profiles) > aio.MAX_BLOCKS_IN_FLIGHT:
        raise ConfigError(
            f"profile: expected at most {aio.MAX_BLOCKS_IN_FLIGHT} blocks in flight on all drives,"
            f" got {read_depth} reads and {write_depth} writes on each of {_num_drives(profiles)}."
            " Measure again."
        )
    backend = config.aio_backend
    fallback = None
    if backend == "auto":
        backend, fallback = known[0].backend, "auto"
    return Drives(
        backend,
        max(profile.block_bytes for profile in known),
        _num_drives(profiles),
        read_depth,
        write_depth,
        _rates(profiles),
        "profile of " + ", ".join(f"{profile.path}, {profile.date[:10]}" for profile in known),
        fallback,
        _speeds(profiles),
    )


def _num_drives(profiles: Sequence[Profile | None]) -> int:
    return min(len(profiles), aio.MAX_DRIVES)


def _rates(profiles: Sequence[Profile | None]) -> tuple[float, ...] | None:
    """A step reads about as much as it writes, at the same time."""
    known = [profile.mixed_bytes_per_s for profile in profiles if profile is not None]
    return tuple(known) if len(known) == len(profiles) else None


def _speeds(profiles: Sequence[Profile | None]) -> Rates | None:
    known = [profile for profile in profiles if profile is not None]
    if len(known) < len(profiles):
        return None
    return Rates(
        sum(profile.read_bytes_per_s for profile in known),
        sum(profile.write_bytes_per_s for profile in known),
        sum(profile.mixed_bytes_per_s for profile in known),
    )


def open_queue(drives: Drives) -> aio.Queue:
    """Open it; where a profile's backend does not work any more, another is taken.

    Raises ConfigError where the backend that the user asked for does not work here.
    """
    try:
        return _open(drives, drives.backend)
    except OSError as error:
        if drives.fallback is None:
            raise ConfigError(f"aio_backend: {error.strerror}.") from error
        _LOG.warning("the profile's backend does not work here: %s.", error.strerror)
        return _open(drives, drives.fallback)


def _open(drives: Drives, backend: str) -> aio.Queue:
    return aio.Queue(
        backend, block_bytes=drives.block_bytes, read_depth=drives.read_depth,
        write_depth=drives.write_depth, num_drives=drives.num_drives, keep_stats=True,
    )  # fmt: skip
