"""The store behind the DISK tier: files, sides and the committed generation.

    create / open -> [ begin -> write the spare sides through aio -> commit ]* -> close

`begin` retires the record whose sides will be overwritten; `commit` makes the new sides count.
So every valid record names sides that are whole, at every instant (FORMAT.md).

Threads: `begin`, `commit`, `scratch` and `close` come from one thread at a time, after the
transfers they depend on have ended; `extent`, `spare` and `committed` may be read from any.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import aio
from offload.errors import ConfigError, StoreError
from offload.partition.unit import Role
from offload.store import build, folder, recover
from offload.store.commits import CommitLog
from offload.store.durable import explain
from offload.store.extents import UnitExtents
from offload.store.files import DataFiles, Extent
from offload.store.folder import MANIFEST_NAME
from offload.store.format import DURABILITIES, Manifest, Record, UnitFlag, decode_manifest
from offload.store.generations import Changes, Generations
from offload.store.lock import FolderLock, holder, in_use, release
from offload.store.sharing import Sharing

Paths = Sequence[str | os.PathLike[str]]


def exists(paths: Paths, name: str) -> bool:
    """Tell whether a store of this name holds something that could be resumed or lost."""
    return build.describe_content(folder.find(paths, name)) is not None


class Store(contextlib.AbstractContextManager["Store"]):
    """An open store.  It owns its folders (a lock) unless it is read-only."""

    def __init__(
        self,
        folders: Sequence[Path],
        manifest: Manifest,
        *,
        locks: Sequence[FolderLock],
        durability: str,
        read_only: bool = False,
    ) -> None:
        """Internal: use `create` or `open`."""
        self.folders = tuple(folders)
        self.manifest = manifest
        self.read_only = read_only
        self.files = DataFiles(self.folders, manifest, read_only=read_only)
        self._log = CommitLog(self.folders[0], manifest, read_only=read_only)
        self.generations = Generations(
            self._log, self.files, manifest=manifest, durability=durability
        )
        self.sharing = Sharing(self.files, manifest)
        self._writable: set[str] = set()  # units whose spare side this generation may write
        self._fresh: set[str] = set()  # units whose spare side is known to hold the constants
        self._distrust_spares = False  # no flush covers what they hold, and power may have failed
        self._locks = list(locks)
        if read_only:
            self.generations.refuse("it was opened read-only.")

    @classmethod
    def create(
        cls,
        paths: Paths,
        name: str,
        units: Sequence[UnitExtents],
        *,
        layout: Mapping[str, Any],
        num_sides: int = 2,
        durability: str = "process",
        fresh: bool = False,
        advice: str = "Open it, or discard it with fresh=True.",
        scratch_bytes: int = 0,
        rates: Sequence[float] | None = None,
    ) -> Store:
        """Reserve a new store whole; nothing is committed yet and side 0 may be written.

        `layout` describes the model in JSON values; `open` compares it.  `scratch_bytes` joins the
        check of free space for what `scratch` will ask.  `rates`: bytes per second of each path,
        to which its share is proportional.  `fresh` discards a store of this name; without it,
        `advice` tells what to do with one.
        Raises `StoreError`, with nothing left behind, when a path is missing, unwritable or too
        full, when the name is in use, or when it holds something and `fresh` is false.
        """
        _check_durability(durability)
        with _told(f"store {name!r} cannot be made"):
            found = folder.find(paths, name)
            for store_folder in found.occupied:
                if holder(store_folder) is not None:
                    raise in_use(store_folder)
            build.refuse_existing(found, fresh=fresh, advice=advice)
            placed = build.place(found, units, num_sides, scratch_bytes=scratch_bytes, rates=rates)
            manifest = build.describe_new(
                found, name, placed=placed, num_sides=num_sides, layout=recover.plain(layout)
            )
            locks = build.build(found, manifest, fresh=fresh, advice=advice)
            with contextlib.ExitStack() as undo:
                undo.callback(build.discard, found.folders, locks)
                store = cls(found.folders, manifest, locks=locks, durability=durability)
                undo.callback(store.generations.close)
                undo.callback(store.files.close)
                store.files.open({})
                undo.pop_all()
        return store

    @classmethod
    def open(
        cls,
        paths: Paths,
        name: str,
        *,
        layout: Mapping[str, Any] | None = None,
        durability: str = "process",
        read_only: bool = False,
        unverified: bool = False,
    ) -> Store:
        """Open a store at its newest valid generation.

        Raises `StoreError` when it is missing, in use, or of another `layout` (None: any), and
        `StoreCorrupt` when records or files are damaged.  `read_only` takes no lock and may look
        at a living store: ask `generations.is_current()` after reading.  `unverified` accepts data
        that a power loss may have damaged.
        """
        _check_durability(durability)
        with contextlib.ExitStack() as undo, _told(f"store {name!r} cannot be opened"):
            found = folder.find(paths, name)
            manifest = recover.read_manifest(found, name, layout)
            folders = recover.order_folders(found, manifest)
            locks: list[FolderLock] = []
            undo.callback(lambda: release(locks))
            for store_folder in () if read_only else folders:
                locks.append(FolderLock(store_folder))
            found = folder.find(paths, name)  # again: until now it could change
            manifest = recover.read_manifest(found, name)
            folders = recover.order_folders(found, manifest)
            if layout is not None:
                recover.check_layout(manifest, layout)
            store = cls(folders, manifest, locks=locks, durability=durability, read_only=read_only)
            undo.callback(store.close, flush=False)
            record = recover.newest_record(store._log, manifest)
            if recover.lost_by_power(record) and not unverified:
                recover.check_survived(store.files, record, manifest)
            store.files.open(record.sides)
            store.generations.adopt(record)
            store._distrust_spares = recover.has_restarted(record)
            if not read_only:
                store.sharing.trim()
            undo.pop_all()
        return store

    @classmethod
    def open_folder(cls, folder: Path, *, layout: Mapping[str, Any]) -> Store:
        """Open a folder that holds a whole store with one side of each unit, read-only."""
        with contextlib.ExitStack() as undo, _told(f"{folder} cannot be opened"):
            where = folder / MANIFEST_NAME
            manifest = decode_manifest(where.read_bytes(), str(where))
            recover.check_layout(manifest, layout)
            store = cls([folder], manifest, locks=(), durability="step", read_only=True)
            undo.callback(store.close)
            record = recover.newest_record(store._log, manifest)
            store.files.open(record.sides)
            store.generations.adopt(record)
            undo.pop_all()
        return store

    @property
    def committed(self) -> Record | None:
        """The generation that counts; None before the first commit."""
        return self.generations.committed

    def extent(self, unit: str, role: Role, side: int) -> Extent:
        """Where a role of a unit lies on one side; valid until `close`."""
        return self.files.extent(unit, role, side)

    def spare(self, unit: str) -> int:
        """Return the side that the next generation of `unit` may be written to after `begin`."""
        if self.committed is None:
            return 0
        return (self.committed.sides[unit] + 1) % self.manifest.num_sides

    def begin(self, units: Iterable[str] | None = None) -> None:
        """Call before the first write to the spare sides of `units` (None: all of them).

        Retires the record that names the spare sides: from here on a crash goes back to
        `committed` (with one side: to nothing).  A side that a checkpoint shares is replaced, so
        ask `extent` again.  Another call adds units.
        """
        self.generations.begin()
        last = self.committed
        if last is None:
            return
        with _told(f"store {self.manifest.name!r}: a generation cannot begin"):
            for unit in last.sides if units is None else units:
                if unit not in self._writable:
                    stale = UnitFlag.SPARE_STALE in last.flags[unit]
                    stale |= self._distrust_spares and unit not in self._fresh
                    self.sharing.make_writable(
                        unit, self.spare(unit), committed=last.sides[unit], stale=stale
                    )
                    self._writable.add(unit)
                    self._fresh.add(unit)

    def commit(
        self,
        *,
        sides: Mapping[str, int],
        generation: int | None = None,
        payload: bytes = b"",
        flags: Mapping[str, UnitFlag] | None = None,
        checksums: Mapping[str, int] | None = None,
        in_memory: bool = False,
    ) -> Record:
        """Make `sides` the generation that counts, with the engine's state in `payload`.

        All writes to these sides must have ended.  Units not named keep side, flags and
        checksums; the first commit names all.  `generation` defaults to the next number; the
        same number again (a new payload only) needs no `begin`.  `checksums` holds the digest of
        each filled checksum extent.  With durability "step" it returns when everything is on the
        drive.  A failure raises `StoreError` and refuses all further writes.  `in_memory`: nothing
        is written, the generation counts for this process until a later commit.
        """
        record = self.generations.commit(
            Changes(
                sides=sides,
                generation=generation,
                payload=payload,
                flags=flags or {},
                checksums=checksums or {},
            ),
            in_memory=in_memory,
        )
        if not in_memory:
            self._writable.clear()
        return record

    def poison(self, error: BaseException) -> None:
        """Refuse further commits: a transfer failed, so what the spare sides hold is unknown."""
        self.generations.refuse(
            f"a transfer failed ({error}); nothing more is written until it is opened again."
        )

    def scratch(self, name: str, num_bytes: int, *, path: int | None = None) -> aio.File:
        """Reserve a file for spilled data; the store closes it, and a restart forgets it.

        `path` numbers one of `folders`; None: the one with the most free space.
        """
        self.generations.check_writable()
        with _told(f"store {self.manifest.name!r}: scratch {name!r} ({num_bytes} bytes)"):
            if path is None:
                free = [build.Space.of(at).free_bytes for at in self.folders]
                path = free.index(max(free))
            return self.files.scratch(name, num_bytes, path)

    @property
    def disk_bytes(self) -> int:
        """Bytes reserved for data and scratch, all sides."""
        return self.files.num_bytes

    def close(self, *, flush: bool = True) -> None:
        """Give the store up; may be called twice.

        `flush` makes the committed generation survive a power loss, whatever its durability.
        """
        try:
            if flush and self._locks:
                self.generations.flush()
        finally:
            self.generations.close()
            self.files.close()
            release(self._locks)
            self._locks = []

    def remove(self) -> None:
        """Delete the store and close it."""
        locks, self._locks = self._locks, []
        self.close()
        if locks:
            build.discard(self.folders, locks)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_durability(durability: str) -> None:
    if durability not in DURABILITIES:
        expected = ", ".join(repr(name) for name in DURABILITIES)
        raise ConfigError(f"durability: expected one of {expected}, got {durability!r}.")


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn an operating system's error into one line that says what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(explain(error, what)) from error
