"""The data files of an open store: one `aio.File` per (unit, side), and the scratch files."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aio
from offload.errors import StoreCorrupt, StoreError
from offload.partition.unit import Role
from offload.store import durable
from offload.store.extents import HEADER_BYTES, SIDE_NAMES, FileLayout
from offload.store.folder import NEXT_SUFFIX, SCRATCH_PREFIX, clear_scratch
from offload.store.format import Manifest, check_data_header, encode_data_header

_OTHER_DESCRIPTORS = 256  # what the process opens besides the store
_PER_FILE = 2  # an aio.File has a direct and a buffered descriptor


@dataclass(frozen=True)
class Extent:
    """The bytes of one (unit, role, side).  `num_bytes` is padded to 4096."""

    file: aio.File
    offset: int
    num_bytes: int


class DataFiles:
    """Opens, hands out and flushes the data files; knows nothing of generations."""

    def __init__(self, folders: Sequence[Path], manifest: Manifest, *, read_only: bool) -> None:
        self._folders = folders
        self._manifest = manifest
        self._read_only = read_only
        self._layouts = {file.unit: file for file in manifest.files}
        self._files: dict[tuple[str, int], aio.File] = {}
        self._scratch: dict[str, aio.File] = {}
        self._renamed: set[Path] = set()  # folders with new names that no flush covers

    def open(self, committed: Mapping[str, int]) -> None:
        """Check and open every file; one that holds nothing committed is made again if need be."""
        for folder in self._folders:
            if not self._read_only:
                clear_scratch(folder)
        allow_open_files(len(self._manifest.files) * self._manifest.num_sides * _PER_FILE)
        for layout in self._manifest.files:
            kept = committed.get(layout.unit)
            for side in range(self._manifest.num_sides):
                path = self.path(layout.unit, side)
                if side == kept:
                    check_file(path, self._manifest, layout, side)
                elif self._read_only:
                    continue
                elif kept is not None and not self._is_whole(layout, side):
                    self.put_new(layout.unit, side, constants_of=kept)
                self._files[layout.unit, side] = aio.File(
                    path, "r" if self._read_only else "r+", drive=layout.path
                )

    def _is_whole(self, layout: FileLayout, side: int) -> bool:
        try:
            check_file(self.path(layout.unit, side), self._manifest, layout, side)
        except StoreCorrupt:
            return False
        return True

    def next_path(self, unit: str, side: int) -> Path:
        """The file that is reserved to take the place of a side."""
        path = self.path(unit, side)
        return path.with_name(path.name + NEXT_SUFFIX)

    def reserve_next(self, unit: str, side: int) -> None:
        make_file(self.next_path(unit, side), self._manifest, self.layout(unit), side)

    def put_new(self, unit: str, side: int, *, constants_of: int) -> None:
        """Put a new file in the place of a side that is missing, damaged or shared.

        Its constants are those of side `constants_of`; if that is the side itself, all of its data
        is copied.  Under its name a file is always whole: it is filled first and renamed then.
        """
        path, new = self.path(unit, side), self.next_path(unit, side)
        self.reserve_next(unit, side)
        source = self.path(unit, constants_of)
        if constants_of == side:
            durable.copy(source, new, HEADER_BYTES, self.layout(unit).file_bytes)
        else:
            self._copy_constants(unit, source, new)
        durable.rename(new, path)
        self._renamed.add(path.parent)
        old = self._files.pop((unit, side), None)
        if old is not None:
            old.close()
            self._files[unit, side] = aio.File(path, "r+", drive=self.layout(unit).path)

    def copy_constants(self, unit: str, *, source: int, target: int) -> None:
        """Bring what no step writes from one side to the other."""
        self._copy_constants(unit, self.path(unit, source), self.path(unit, target))

    def _copy_constants(self, unit: str, source: Path, target: Path) -> None:
        layout = self.layout(unit)
        for role, (start, stop) in layout.constants.items():
            first = layout.roles[role].offset
            durable.copy(source, target, first + start, first + stop)

    def path(self, unit: str, side: int) -> Path:
        layout = self.layout(unit)
        return self._folders[layout.path] / layout.names[side]

    def layout(self, unit: str) -> FileLayout:
        if unit not in self._layouts:
            raise KeyError(f"store {self._manifest.name!r} has no unit {unit!r}")
        return self._layouts[unit]

    def extent(self, unit: str, role: Role, side: int) -> Extent:
        place = self.layout(unit).roles[role]
        return Extent(self._files[unit, side], place.offset, place.padded_bytes)

    def flush(self, sides: Iterable[tuple[str, int]]) -> None:
        while self._renamed:
            durable.flush_folder(self._renamed.pop())
        for key in sides:
            durable.flush_file(self._files[key])

    def scratch(self, name: str, num_bytes: int, path: int) -> aio.File:
        if name in self._scratch:
            raise ValueError(f"scratch file {name!r} is open already")
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]
        file_name = f"{SCRATCH_PREFIX}{len(self._scratch):05d}-{readable}"
        full = self._folders[path] / file_name
        fd = os.open(full, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            durable.reserve(fd, num_bytes)
        except OSError:
            full.unlink()
            raise
        finally:
            os.close(fd)
        self._scratch[name] = aio.File(full, "r+", drive=path)
        return self._scratch[name]

    @property
    def num_bytes(self) -> int:
        """Reserved bytes: data of all sides, and scratch."""
        data = sum(file.file_bytes for file in self._manifest.files) * self._manifest.num_sides
        return data + sum(file.size for file in self._scratch.values())

    def close(self) -> None:
        for file in (*self._files.values(), *self._scratch.values()):
            file.close()
        self._files.clear()
        self._scratch.clear()


def make_file(path: Path, manifest: Manifest, layout: FileLayout, side: int) -> None:
    """Reserve a data file whole and write its header; what it held is lost."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        durable.reserve(fd, layout.file_bytes)
        os.ftruncate(fd, layout.file_bytes)
        durable.write_at(fd, encode_data_header(manifest, layout, side), 0)
    finally:
        os.close(fd)


def check_file(path: Path, manifest: Manifest, layout: FileLayout, side: int) -> None:
    """Raise unless the file is there, whole, and what the manifest says."""
    where = f"store {path.parent}: unit {layout.unit!r}, side {SIDE_NAMES[side]}"
    try:
        with path.open("rb", buffering=0) as file:
            block = file.read(HEADER_BYTES)
            num_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise StoreCorrupt(f"{where}: the file {path.name} is missing.") from None
    except OSError as error:
        raise StoreError(f"{where}: {path.name} cannot be read: {error.strerror}.") from error
    if num_bytes != layout.file_bytes:
        raise StoreCorrupt(
            f"{where}: {path.name} is truncated or overgrown: "
            f"expected {layout.file_bytes} bytes, got {num_bytes}."
        )
    check_data_header(block, manifest, layout, side)


def allow_open_files(num_files: int) -> None:
    """Raise the soft limit of open files where the store needs it; refuse where it cannot."""
    needed = num_files + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StoreError(
            f"the store opens {num_files} files: expected a limit of at least {needed} open "
            f"files, got {hard}. Raise it (ulimit -Hn {needed})."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
