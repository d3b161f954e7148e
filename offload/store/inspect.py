"""Look at stores from outside: what lies in a directory, whether it is whole, what is left over.

Everything here works without the engine and while another process holds the store; only
`reclaim` changes anything, and takes the lock first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OffloadError, StoreError
from offload.store import checksum, files, folder, recover
from offload.store.build import describe_content, format_bytes
from offload.store.commits import CommitLog
from offload.store.format import Manifest, Record, UnitFlag
from offload.store.lock import FolderLock, holder, release

Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class StoreReport:
    """What is known of one store name at the given paths."""

    name: str
    folders: tuple[Path, ...]  # those that exist
    holder: int | None  # the process that has it open; 0: unknown, None: nobody
    manifest: Manifest | None  # None: a left-over without state, or damaged
    record: Record | None  # the newest valid generation
    problems: tuple[str, ...]
    data_bytes: int  # on the disk, without scratch
    scratch_bytes: int
    reserved_bytes: int  # of the data: what takes the place of files that checkpoints share

    @property
    def reclaimable_bytes(self) -> int:
        """What `reclaim` would free: scratch of dead jobs, and stores that hold nothing."""
        if self.holder is not None:
            return 0
        empty = self.record is None and not self.problems
        return self.scratch_bytes + (self.data_bytes if empty else 0)

    def __str__(self) -> str:
        lines = [f"{self.name} in {', '.join(str(path) for path in self.folders)}"]
        if self.holder is not None:
            lines.append(f"  in use by process {self.holder or '(unknown)'}")
        if self.manifest is not None:
            sides = self.manifest.num_sides
            lines.append(f"  {len(self.manifest.files)} units, {sides} side{'s' * (sides > 1)}")
            lines += _optimizer(self.manifest)
        if self.record is not None:
            flushed = "flushed" if self.record.flushed else "not flushed"
            sealed = sum(UnitFlag.CHECKSUMS in flag for flag in self.record.flags.values())
            lines.append(
                f"  generation {self.record.generation} "
                f'(durability="{self.record.durability}", {flushed}), '
                f"{sealed} of {len(self.record.flags)} units have checksums"
            )
        elif self.holder is not None:
            lines.append("  no generation: it is being made, or written in place")
        elif not self.problems:
            lines.append(
                "  no generation: a left-over of a job that ended before its first commit, "
                'or was killed with durability="none"'
            )
        sizes = f"{format_bytes(self.data_bytes)} of data"
        if self.reserved_bytes:
            sizes += f", {format_bytes(self.reserved_bytes)} of it reserved beside checkpoints"
        lines.append(f"  {sizes}, {format_bytes(self.scratch_bytes)} of scratch")
        lines += [f"  PROBLEM: {problem}" for problem in self.problems]
        if self.reclaimable_bytes:
            lines.append(f"  {format_bytes(self.reclaimable_bytes)} can be reclaimed")
        return "\n".join(lines)


def _optimizer(manifest: Manifest) -> list[str]:
    """Who updates the store, and in what its state is; stores of other makers say nothing."""
    layout = manifest.layout
    if "optimizer" not in layout or "state_dtype" not in layout:
        return []
    return [f"  optimizer {layout['optimizer']}, state in {layout['state_dtype']}"]


def find_stores(paths: Paths) -> list[StoreReport]:
    """Report every store that has a folder at one of `paths`."""
    names = {
        entry.name.removeprefix("offload-")
        for path in paths
        for entry in os.scandir(path)
        if entry.is_dir() and entry.name.startswith("offload-")
    }
    return [describe(paths, name) for name in sorted(names)]


def describe(paths: Paths, name: str) -> StoreReport:
    """Report on one store; damage is listed, not raised."""
    sizes = dict.fromkeys(("data", "scratch", "reserved"), 0)
    manifest: Manifest | None = None
    record: Record | None = None
    problems: list[str] = []
    try:
        found = folder.find(paths, name)
        folders = found.occupied
        if found.manifest is not None:
            manifest = recover.read_manifest(found, name)
            record, problems = _record_of(found.manifest.parent, manifest)
            problems += _file_problems(recover.order_folders(found, manifest), manifest, record)
        else:
            folder.check_half_made(found)
    except (OffloadError, OSError) as error:
        problems.append(str(error))
        own = (folder.folder_of(Path(path), name) for path in paths)
        folders = tuple(store_folder for store_folder in own if store_folder.is_dir())
    for store_folder in folders:
        for entry in os.scandir(store_folder):
            if not entry.name.startswith(folder.PIN_PREFIX):  # further names of data files
                is_scratch = entry.name.startswith(folder.SCRATCH_PREFIX)
                num_bytes = entry.stat().st_blocks * 512
                sizes["scratch" if is_scratch else "data"] += num_bytes
                sizes["reserved"] += num_bytes * entry.name.endswith(folder.NEXT_SUFFIX)
    pids = [pid for pid in map(holder, folders) if pid is not None]
    return StoreReport(
        name=name,
        folders=folders,
        holder=pids[0] if pids else None,
        manifest=manifest,
        record=record,
        problems=tuple(problems),
        data_bytes=sizes["data"],
        scratch_bytes=sizes["scratch"],
        reserved_bytes=sizes["reserved"],
    )


def verify(paths: Paths, name: str) -> Iterator[tuple[str, list[str]]]:
    """Read the committed generation unit by unit; yield each unit and what is wrong with it.

    A unit without checksums yields one line that says so: it cannot be verified.  Raises
    `StoreError` when there is no generation to verify.
    """
    found = folder.find(paths, name)
    manifest = recover.read_manifest(found, name)
    folders = recover.order_folders(found, manifest)
    with contextlib.closing(CommitLog(folders[0], manifest, read_only=True)) as log:
        record = recover.newest_record(log, manifest)
    yield from verify_record(folders, manifest, record)


def verify_record(
    folders: Sequence[Path], manifest: Manifest, record: Record
) -> Iterator[tuple[str, list[str]]]:
    """Read what a record names, unit by unit; as `verify`."""
    data = files.DataFiles(folders, manifest, read_only=True)
    for layout in manifest.files:
        problems = _file_problems(folders, manifest, record, only=layout.unit)
        if not problems:
            problems = list(checksum.damage(data, record, layout.unit))
            if not checksum.is_sealed(record, layout.unit):
                problems = [f"unit {layout.unit!r}: has no checksums to verify"]
        yield layout.unit, problems


def reclaim(paths: Paths, name: str) -> int:
    """Remove what a dead job left behind and nobody can use; return the bytes that it freed.

    Scratch files always; the whole store only if it never held a generation.  Raises
    `StoreError` when the store is in use.
    """
    report = describe(paths, name)
    found = folder.find(paths, name)
    locks: list[FolderLock] = []
    try:
        for store_folder in found.occupied:
            locks.append(FolderLock(store_folder))
        report = describe(paths, name)  # again, now that it cannot change
        whole = describe_content(found) is None and not report.problems
        for store_folder in found.occupied:
            folder.check_only_ours(store_folder)
            folder.clear_scratch(store_folder)
        if whole:
            folder.remove(found.occupied)
    finally:
        release(locks)
    return report.scratch_bytes + (report.data_bytes if whole else 0)


def _record_of(store_folder: Path, manifest: Manifest) -> tuple[Record | None, list[str]]:
    with contextlib.closing(CommitLog(store_folder, manifest, read_only=True)) as log:
        return log.read()


def _file_problems(
    folders: Sequence[Path], manifest: Manifest, record: Record | None, only: str | None = None
) -> list[str]:
    """Missing, cut or exchanged files among those that the record names."""
    problems = []
    data = files.DataFiles(folders, manifest, read_only=True)
    for layout in manifest.files:
        if record is None or (only is not None and layout.unit != only):
            continue
        side = record.sides[layout.unit]
        try:
            files.check_file(data.path(layout.unit, side), manifest, layout, side)
        except StoreError as error:
            problems.append(str(error))
    return problems
