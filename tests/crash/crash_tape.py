"""A file layer that remembers: what was written when, what was flushed, and what a crash leaves.

base image + tape of (write | flush)      one recording of a real run
  |
  +- process dies after op n              the first n writes, the last whole or cut at a block
  +- power fails after op n               flushed writes stay; of the others every 512-byte
                                          sector has the bytes of any of its versions
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import aio
from offload.store import durable

SECTOR = 512
BLOCK = 4096
Image = dict[str, bytes]


@dataclass(frozen=True)
class Write:
    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Flush:
    path: str


@dataclass(frozen=True)
class Reserve:
    path: str
    num_bytes: int


@dataclass(frozen=True)
class Rename:
    source: str
    target: str


@dataclass(frozen=True)
class FlushFolder:
    path: str


Op = Write | Flush | Reserve | Rename | FlushFolder


@dataclass
class Drive:
    """Files under their names, and what of them is on the drive whatever happens."""

    names: dict[str, int]  # path -> number of the file
    files: dict[int, bytearray]  # as the process sees them
    kept: dict[int, bytearray]  # flushed
    kept_names: dict[str, int]
    waiting: dict[int, list[Write]]  # not flushed
    renames: list[Rename]  # not flushed

    @classmethod
    def of(cls, base: Image) -> Drive:
        names = {path: number for number, path in enumerate(base)}
        files = {names[path]: bytearray(data) for path, data in base.items()}
        kept = {number: bytearray(data) for number, data in files.items()}
        return cls(names, files, kept, dict(names), {}, [])

    def apply(self, op: Op) -> None:
        match op:
            case Write(path, offset, data):
                put(self.files[self.names[path]], offset, data)
                self.waiting.setdefault(self.names[path], []).append(op)
            case Flush(path):
                for write in self.waiting.pop(self.names[path], []):
                    put(self.kept[self.names[path]], write.offset, write.data)
            case Reserve(path, num_bytes):
                self._reserve(path, num_bytes)
            case Rename(source, target):
                self.names[target] = self.names.pop(source)
                self.renames.append(op)
            case FlushFolder(path):
                self.settle_names(len(self.renames))

    def _reserve(self, path: str, num_bytes: int) -> None:
        if path not in self.names:
            number = max(self.files, default=-1) + 1
            self.names[path] = self.kept_names[path] = number
            self.files[number], self.kept[number] = bytearray(), bytearray()
        for files in (self.files, self.kept):
            data = files[self.names[path]]
            data.extend(bytes(max(0, num_bytes - len(data))))

    def settle_names(self, num_renames: int) -> None:
        for op in self.renames[:num_renames]:
            self.kept_names[op.target] = self.kept_names.pop(op.source)
        del self.renames[:num_renames]


@dataclass
class Tape:
    """Records what goes through `offload.store.durable`, and the data that a test writes."""

    base: Image = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_write, real_reserve, real_rename = durable.write_at, durable.reserve, durable.rename

        def write_at(fd: int, data: bytes, offset: int) -> None:
            self.ops.append(Write(path_of(fd), offset, bytes(data)))
            real_write(fd, data, offset)

        def reserve(fd: int, num_bytes: int) -> None:
            self.ops.append(Reserve(path_of(fd), num_bytes))
            real_reserve(fd, num_bytes)

        def rename(source: Path, target: Path) -> None:
            self.ops.append(Rename(str(source), str(target)))
            real_rename(source, target)

        def flush(fd: int) -> None:
            self.ops.append(Flush(path_of(fd)))

        def flush_file(file: aio.File) -> None:
            self.ops.append(Flush(file.path))

        def flush_folder(folder: Path) -> None:
            self.ops.append(FlushFolder(str(folder)))

        for name, own in (
            ("write_at", write_at), ("reserve", reserve), ("rename", rename), ("flush", flush),
            ("flush_file", flush_file), ("flush_folder", flush_folder),
        ):  # fmt: skip
            monkeypatch.setattr(durable, name, own)

    def start(self, folder: Path) -> None:
        """From here on: everything in `folder` counts as being on the drive."""
        self.base = {str(path): path.read_bytes() for path in folder.iterdir()}
        self.ops.clear()

    def after_kill(self, num_ops: int, *, cut: int | None = None) -> Image:
        """The files after the first `num_ops` operations; `cut`: bytes of one more write."""
        drive = self._drive(num_ops)
        if cut is not None:
            last = self.ops[num_ops]
            assert isinstance(last, Write)
            drive.apply(Write(last.path, last.offset, last.data[:cut]))
        return {path: bytes(drive.files[number]) for path, number in drive.names.items()}

    def after_power_loss(self, num_ops: int, choose: random.Random, keep: float) -> Image:
        """The drive after `num_ops` operations: of what no flush covers, `keep` of the sectors.

        Of the renames that no flush of a folder covers, the first ones may have happened.
        """
        drive = self._drive(num_ops)
        for number, writes in drive.waiting.items():
            for write in writes:
                assert write.offset % SECTOR == 0
                for start in range(0, len(write.data), SECTOR):
                    if choose.random() < keep:
                        sector = write.data[start : start + SECTOR]
                        put(drive.kept[number], write.offset + start, sector)
        drive.settle_names(sum(choose.random() < keep for _ in drive.renames))
        return {path: bytes(drive.kept[number]) for path, number in drive.kept_names.items()}

    def _drive(self, num_ops: int) -> Drive:
        drive = Drive.of(self.base)
        for op in self.ops[:num_ops]:
            drive.apply(op)
        return drive


def put(data: bytearray, offset: int, piece: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(piece)] = piece


def path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def lay_down(image: Image, folder: Path) -> None:
    """Make `folder` hold the files of `image` and nothing else."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for path, data in image.items():
        target = folder / Path(path).name
        target.write_bytes(data.rstrip(b"\0"))
        os.truncate(target, len(data))
