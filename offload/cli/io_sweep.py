"""Measure a drive: bytes per second for each backend, block size and depth.

    file      [ written once, then measured ]            unlinked as soon as it is open, so that
    buffer    [ piece | piece | ... | piece ]            nothing is left behind however this ends
                  ^ each piece is one transfer in flight; the queue cuts it into blocks

`read` and `write` go through the file round and round; `mixed` reads its first half while it
writes the second, with half the depth for each.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import aio

OPERATIONS = ("read", "write", "mixed")
BLOCKS = (256 << 10, 1 << 20, 4 << 20)
DEPTHS = (4, 8, 16)
PIECE_BYTES = 16 << 20
NUM_PIECES = 8
LEAST_FILE_BYTES = 4 * PIECE_BYTES


@dataclass(frozen=True)
class Setting:
    """One point of the sweep."""

    operation: str
    backend: str
    block_bytes: int
    depth: int  # blocks in flight, reads and writes together


@dataclass(frozen=True)
class Sample:
    """What a setting reached."""

    setting: Setting
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


def settings(backends: tuple[str, ...]) -> list[Setting]:
    return [
        Setting(operation, backend, block_bytes, depth)
        for operation in OPERATIONS
        for backend in backends
        for block_bytes in BLOCKS
        for depth in DEPTHS
    ]


class Target:
    """A nameless file of `num_bytes` in `folder` and the buffer that feeds it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes // (2 * PIECE_BYTES) * 2 * PIECE_BYTES, LEAST_FILE_BYTES)
        path = folder / f".offload-bench-{os.getpid()}"
        self.file = aio.File(path, mode="x+")
        path.unlink()
        try:
            self.file.reserve(self.num_bytes)
            self.buffer = aio.Buffer(PIECE_BYTES * NUM_PIECES)
        except BaseException:
            self.file.close()
            raise
        self.pieces = [
            self.buffer.view[start : start + PIECE_BYTES]
            for start in range(0, PIECE_BYTES * NUM_PIECES, PIECE_BYTES)
        ]
        # Drives that compress or know zeros would otherwise look faster than they are.
        words = np.frombuffer(self.buffer.view, np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 2**63, len(words), np.uint64)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.pieces.clear()
        self.buffer.close()

    def fill(self) -> None:
        """Write the whole file once: first writes into reserved space are slower than others."""
        with aio.Queue(read_depth=8, write_depth=8) as queue:
            tickets: deque[aio.Ticket] = deque()
            for index, offset in enumerate(range(0, self.num_bytes, PIECE_BYTES)):
                if len(tickets) == NUM_PIECES:
                    tickets.popleft().wait()
                piece = self.pieces[index % NUM_PIECES]
                tickets.append(queue.write(self.file, piece, offset))
            for ticket in tickets:
                ticket.wait()


def measure(target: Target, setting: Setting, *, seconds: float) -> Sample:
    """Keep transfers in flight for `seconds`; the time until the last one ends counts."""
    share = setting.depth // 2 if setting.operation == "mixed" else setting.depth
    with aio.Queue(
        setting.backend, block_bytes=setting.block_bytes, read_depth=share, write_depth=share
    ) as queue:
        queue.register(target.buffer)
        tickets: deque[aio.Ticket] = deque()
        start = time.perf_counter()
        num_bytes = 0
        for index, (writes, offset) in enumerate(transfers(setting.operation, target.num_bytes)):
            if len(tickets) == NUM_PIECES:
                tickets.popleft().wait()
                num_bytes += PIECE_BYTES
                if time.perf_counter() - start >= seconds:
                    break
            submit = queue.write if writes else queue.read
            tickets.append(submit(target.file, target.pieces[index % NUM_PIECES], offset))
        for ticket in tickets:
            ticket.wait()
            num_bytes += PIECE_BYTES
        return Sample(setting, num_bytes, time.perf_counter() - start)


def transfers(operation: str, file_bytes: int) -> Iterator[tuple[bool, int]]:
    """For ever: whether the next transfer writes, and its offset."""
    if operation != "mixed":
        while True:
            yield from ((operation == "write", at) for at in range(0, file_bytes, PIECE_BYTES))
    half = file_bytes // 2
    while True:
        for at in range(0, half, PIECE_BYTES):
            yield False, at
            yield True, half + at
