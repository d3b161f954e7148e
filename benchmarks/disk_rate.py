"""Measure what a disk gives right now: reads alone, writes alone, both at once.

    python disk_rate.py FILE [--seconds S]      prints one JSON line of bytes per second

Direct I/O in blocks of 2 MiB on huge pages from eight threads a direction: the limit that a
step's bytes are held against. The file is made by `prepare` and written once beforehand, since
first writes into reserved space are slower. Who writes a new store is held against `fresh_rates`,
whose writes are such first writes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 2 << 20
NUM_THREADS = 8
FRESH_BYTES = 2 << 30


def prepare(path: Path, size_bytes: int = 1 << 30) -> None:
    """Reserve the file and write all of it once."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        with _huge_buffer() as buffer:
            for offset in range(0, size_bytes, BLOCK_BYTES):
                _transfer(os.pwritev, fd, buffer, offset)
    finally:
        os.close(fd)


def _huge_buffer() -> mmap.mmap:
    buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(os.urandom(4096) * (BLOCK_BYTES // 4096))
    return buffer


def _transfer(call: Callable[..., int], fd: int, buffer: mmap.mmap, offset: int) -> None:
    done = call(fd, [buffer], offset)
    if done != BLOCK_BYTES:
        raise OSError(f"{call.__name__} at {offset}: expected {BLOCK_BYTES} bytes, got {done}")


@dataclass(frozen=True)
class Direction:
    """Transfers of one kind, from NUM_THREADS threads that share a file."""

    call: Callable[..., int]  # os.preadv or os.pwritev
    path: Path
    once: bool = False  # every block at most once; all directions stop when a thread has no more


def rate(directions: Sequence[Direction], seconds: float) -> float:
    """Bytes per second of the given directions together; each has its own threads and offsets."""
    fds = [os.open(direction.path, os.O_RDWR | os.O_DIRECT) for direction in directions]
    moved = [0] * (len(directions) * NUM_THREADS)
    stop = threading.Event()
    start = time.perf_counter()

    def run(index: int) -> None:
        direction, fd = directions[index // NUM_THREADS], fds[index // NUM_THREADS]
        num_blocks = os.fstat(fd).st_size // BLOCK_BYTES
        block = index * num_blocks // len(moved)  # directions on one file keep apart
        left = num_blocks // NUM_THREADS
        if direction.once:
            block = index % NUM_THREADS * left
        with _huge_buffer() as buffer:
            while time.perf_counter() < start + seconds and not stop.is_set():
                _transfer(direction.call, fd, buffer, block % num_blocks * BLOCK_BYTES)
                moved[index] += BLOCK_BYTES
                block, left = block + 1, left - 1
                if direction.once and not left:
                    stop.set()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(moved))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    for fd in fds:
        os.close(fd)
    return sum(moved) / elapsed


def rates(path: Path, seconds: float) -> dict[str, float]:
    """Rates of reads, writes and both together, `seconds` each."""
    read, write = Direction(os.preadv, path), Direction(os.pwritev, path)
    return {
        "read": rate([read], seconds),
        "write": rate([write], seconds),
        "mixed": rate([read, write], seconds),
    }


def fresh_rates(path: Path, seconds: float) -> dict[str, float]:
    """As `rates`, but writes go to space that was reserved just before and never written."""
    read = Direction(os.preadv, path)
    with _reserved(path) as new:
        write = rate([Direction(os.pwritev, new, once=True)], seconds)
    with _reserved(path) as new:
        mixed = rate([read, Direction(os.pwritev, new, once=True)], seconds)
    return {"read": rate([read], seconds), "write": write, "mixed": mixed}


@contextlib.contextmanager
def _reserved(beside: Path, size_bytes: int = FRESH_BYTES) -> Iterator[Path]:
    """A file whose blocks are reserved as the store reserves them; removed afterwards."""
    path = beside.with_name(beside.name + ".fresh")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        yield path
    finally:
        os.close(fd)
        path.unlink()


def floor_s(read_bytes: float, write_bytes: float, measured: dict[str, float]) -> float:
    """The least time in which a disk of these rates moves these bytes."""
    return max(
        read_bytes / measured["read"],
        write_bytes / measured["write"],
        (read_bytes + write_bytes) / measured["mixed"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    print(json.dumps(rates(options.file, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
