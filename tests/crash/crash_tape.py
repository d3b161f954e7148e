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


@dataclass
class Tape:
    """Records what goes through `offload.store.durable`, and the data that a test writes."""

    base: Image = field(default_factory=dict)
    ops: list[Write | Flush] = field(default_factory=list)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_write = durable.write_at

        def write_at(fd: int, data: bytes, offset: int) -> None:
            self.ops.append(Write(path_of(fd), offset, bytes(data)))
            real_write(fd, data, offset)

        def flush(fd: int) -> None:
            self.ops.append(Flush(path_of(fd)))

        def flush_file(file: aio.File) -> None:
            self.ops.append(Flush(file.path))

        monkeypatch.setattr(durable, "write_at", write_at)
        monkeypatch.setattr(durable, "flush", flush)
        monkeypatch.setattr(durable, "flush_file", flush_file)

    def start(self, folder: Path) -> None:
        """From here on: everything in `folder` counts as being on the drive."""
        self.base = {str(path): path.read_bytes() for path in folder.iterdir()}
        self.ops.clear()

    def after_kill(self, num_ops: int, *, cut: int | None = None) -> Image:
        """The files after the first `num_ops` operations; `cut`: bytes of one more write."""
        image = {path: bytearray(data) for path, data in self.base.items()}
        writes = [op for op in self.ops[:num_ops] if isinstance(op, Write)]
        if cut is not None:
            last = self.ops[num_ops]
            assert isinstance(last, Write)
            writes.append(Write(last.path, last.offset, last.data[:cut]))
        for op in writes:
            put(image[op.path], op.offset, op.data)
        return {path: bytes(data) for path, data in image.items()}

    def after_power_loss(self, num_ops: int, choose: random.Random, keep: float) -> Image:
        """The drive after `num_ops` operations: of what no flush covers, `keep` of the sectors."""
        image = {path: bytearray(data) for path, data in self.base.items()}
        pending: dict[str, list[Write]] = {}
        for op in self.ops[:num_ops]:
            if isinstance(op, Write):
                pending.setdefault(op.path, []).append(op)
            else:
                for write in pending.pop(op.path, []):
                    put(image[write.path], write.offset, write.data)
        for path, writes in pending.items():
            for write in writes:
                assert write.offset % SECTOR == 0
                for start in range(0, len(write.data), SECTOR):
                    if choose.random() < keep:
                        sector = write.data[start : start + SECTOR]
                        put(image[path], write.offset + start, sector)
        return {path: bytes(data) for path, data in image.items()}


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
