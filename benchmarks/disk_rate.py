"""Measure what a disk gives right now: reads alone, writes alone, both at once.

    python disk_rate.py FILE [--seconds S]      prints one JSON line of bytes per second

Direct I/O in blocks of 2 MiB on huge pages from eight threads a direction: the limit that a
step's bytes are held against. The file is made by `prepare` and written once beforehand, since
first writes into reserved space are slower.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 2 << 20
NUM_THREADS = 8


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


def rate(path: Path, calls: list[Callable[..., int]], seconds: float) -> float:
    """Bytes per second of the given directions together; each has its own threads and offsets."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    num_blocks = os.fstat(fd).st_size // BLOCK_BYTES
    moved = [0] * (len(calls) * NUM_THREADS)
    start = time.perf_counter()

    def run(index: int) -> None:
        call, block = calls[index // NUM_THREADS], index * num_blocks // len(moved)
        with _huge_buffer() as buffer:
            while time.perf_counter() < start + seconds:
                _transfer(call, fd, buffer, block % num_blocks * BLOCK_BYTES)
                moved[index] += BLOCK_BYTES
                block += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(moved))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    os.close(fd)
    return sum(moved) / elapsed


def rates(path: Path, seconds: float) -> dict[str, float]:
    """Rates of reads, writes and both together, `seconds` each."""
    return {
        "read": rate(path, [os.preadv], seconds),
        "write": rate(path, [os.pwritev], seconds),
        "mixed": rate(path, [os.preadv, os.pwritev], seconds),
    }


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
