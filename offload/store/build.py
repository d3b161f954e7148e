"""Make a new store: check everything first, reserve all of it, or leave nothing behind.

paths, old store, free space      nothing is touched yet
folder, LOCK                      ours from here on
PART, data, COMMIT.0/1            reserved whole; an error or a signal removes all of it
MANIFEST                          now the store exists
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError, StoreError
from offload.store import commits, durable, files, folder
from offload.store.extents import SIDE_NAMES, FileLayout, UnitExtents, spread
from offload.store.folder import Found
from offload.store.format import BLANK, Manifest, decode_manifest, encode_manifest
from offload.store.lock import FolderLock, release

_LOG = logging.getLogger(__name__)
_OVERHEAD_BYTES = 1 << 20  # the manifest, and the file system's own blocks, per folder


@dataclass(frozen=True)
class Space:
    """What one path must hold and has."""

    path: Path
    device: int
    free_bytes: int  # with what clearing an old store gives back

    @classmethod
    def of(cls, store_folder: Path) -> Space:
        stat = os.statvfs(store_folder.parent)
        free = stat.f_bavail * stat.f_frsize
        if store_folder.is_dir():
            entries = [entry.stat() for entry in os.scandir(store_folder)]
            free += sum(entry.st_blocks * 512 for entry in entries if entry.st_nlink == 1)
        return cls(store_folder.parent, os.stat(store_folder.parent).st_dev, free)


def place(
    found: Found,
    units: Sequence[UnitExtents],
    num_sides: int,
    *,
    scratch_bytes: int = 0,
    rates: Sequence[float] | None = None,
) -> list[FileLayout]:
    """Spread the units over the paths; raise with the arithmetic when they do not fit."""
    if rates is not None and not (len(rates) == len(found.folders) and min(rates) > 0):
        raise ConfigError(
            f"rates: expected one > 0 for each of {len(found.folders)} paths, got {list(rates)}."
        )
    if not 1 <= num_sides <= len(SIDE_NAMES):
        raise ConfigError(f"num_sides: expected 1 or 2, got {num_sides}.")
    if len({unit.name for unit in units}) < len(units) or not units:
        raise ConfigError("the store needs at least one unit, and a name of its own for each.")
    spaces = [Space.of(store_folder) for store_folder in found.folders]
    # Paths on one file system share what is free there.
    sharing = [sum(other.device == space.device for other in spaces) for space in spaces]
    free = [space.free_bytes // count for space, count in zip(spaces, sharing, strict=True)]
    layouts = spread(units, free, num_sides, rates)
    data = [0] * len(spaces)
    for layout in layouts:
        data[layout.path] += layout.file_bytes
    extra = 2 * commits.RESERVED_BYTES + scratch_bytes
    for device in {space.device for space in spaces}:
        here = [i for i, space in enumerate(spaces) if space.device == device]
        one_side = sum(data[i] for i in here)
        fixed = len(here) * _OVERHEAD_BYTES + (extra if 0 in here else 0)
        needed = one_side * num_sides + fixed
        if needed > spaces[here[0]].free_bytes:
            raise StoreError(
                _too_full([spaces[i] for i in here], (one_side, num_sides, fixed, needed))
            )
    return layouts


def _too_full(spaces: Sequence[Space], sums: tuple[int, int, int, int]) -> str:
    one_side, num_sides, fixed, needed = sums
    where = ", ".join(str(space.path) for space in spaces)
    free = spaces[0].free_bytes
    hint = "" if num_sides == 1 else ', or use durability="none" (one side; a crash loses it)'
    return (
        f"store path {where}: expected {format_bytes(needed)} free ({format_bytes(one_side)} of "
        f"state x {num_sides} sides + {format_bytes(fixed)} of records and scratch), got "
        f"{format_bytes(free)}: {format_bytes(needed - free)} short. "
        f"Free space, add a path{hint}."
    )


def format_bytes(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def describe_new(
    found: Found,
    name: str,
    *,
    placed: Sequence[FileLayout],
    num_sides: int,
    layout: Mapping[str, object],
) -> Manifest:
    return Manifest(
        store_id=uuid.uuid4().hex,
        name=name,
        num_sides=num_sides,
        num_paths=len(found.folders),
        rank=0,
        num_ranks=1,
        files=tuple(placed),
        layout=layout,
    )


def refuse_existing(found: Found, *, fresh: bool, advice: str) -> None:
    """Raise, with `advice`, when something would be lost, unless the caller said `fresh`."""
    for store_folder in found.occupied:
        folder.check_only_ours(store_folder)
    if fresh:
        return
    content = describe_content(found)
    if content is not None:
        raise StoreError(
            f"store {found.manifest}: expected no store of this name, got {content}. {advice}"
        )
    folder.check_half_made(found)


def describe_content(found: Found) -> str | None:
    """Say what a store holds that could be lost; None: nothing was ever committed."""
    if found.manifest is None:
        return None
    try:
        manifest = decode_manifest(found.manifest.read_bytes(), str(found.manifest))
        with contextlib.closing(
            commits.CommitLog(found.manifest.parent, manifest, read_only=True)
        ) as log:
            record, problems = log.read()
    except StoreError as error:
        return f"one that cannot be read ({error})"
    except OSError as error:
        return f"one that cannot be read ({error.strerror})"
    if record is not None:
        return f"generation {record.generation} of {len(manifest.files)} units"
    return f"damaged records ({problems[0]})" if problems else None


def build(found: Found, manifest: Manifest, *, fresh: bool, advice: str) -> list[FolderLock]:
    """Write the store in `found.folders`; return the locks, which the caller now owns."""
    locks: list[FolderLock] = []
    touched: list[Path] = []  # removed again if anything fails
    try:
        for store_folder in found.folders:
            if not store_folder.is_dir():
                store_folder.mkdir(mode=0o700)
                touched.append(store_folder)
            locks.append(FolderLock(store_folder))
        # Somebody may have made and left a store since the first look; now nobody can.
        again = folder.find([store_folder.parent for store_folder in found.folders], manifest.name)
        refuse_existing(again, fresh=fresh, advice=advice)
        for store_folder in found.folders:
            _log_reclaimed(store_folder)
            touched += [store_folder] if store_folder not in touched else []
        folder.clear(found.folders)
        _fill(found.folders, manifest)
    except BaseException:
        discard(touched, locks)
        raise
    return locks


def discard(folders: Sequence[Path], locks: Sequence[FolderLock]) -> None:
    """Remove the folders of a store that we hold, then let go of it."""
    with contextlib.suppress(OSError):
        folder.remove(folders)
    release(locks)


def _log_reclaimed(store_folder: Path) -> None:
    names = [name for name in os.listdir(store_folder) if name != "LOCK"]
    if names:
        _LOG.warning("store %s: removing %d files of an earlier job", store_folder, len(names))


def _fill(folders: Sequence[Path], manifest: Manifest) -> None:
    for index, store_folder in enumerate(folders):
        places = tuple(str(each.parent.resolve()) for each in folders)
        part = folder.Part(manifest.store_id, index, len(folders), places)
        durable.replace(store_folder / folder.PART_NAME, folder.encode_part(part))
    for name in folder.COMMIT_NAMES:
        fd = os.open(folders[0] / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            durable.reserve(fd, commits.RESERVED_BYTES)
            durable.write_at(fd, BLANK, 0)
            durable.flush(fd)
        finally:
            os.close(fd)
    for layout in manifest.files:
        for side in range(manifest.num_sides):
            path = folders[layout.path] / layout.names[side]
            files.make_file(path, manifest, layout, side)
    for store_folder in folders:
        durable.flush_folder(store_folder)
        durable.flush_folder(store_folder.parent)
    durable.replace(folders[0] / folder.MANIFEST_NAME, encode_manifest(manifest))
