"""Measure a drive: bytes per second for each backend, block size and depth.

    file      [ written once, then measured ]            unlinked as soon as it is open, so that
    buffer    [ piece | piece | ... | piece ]            nothing is left behind however this ends
                  ^ each piece is one transfer in flight; the queue cuts it into blocks

`read` and `write` go through the file round and round; `mixed` reads its first half while it
writes the second, with half the depth for each.  The sweep compares the backends at one setting,
then blocks and depths with the best backend: the longer a drive takes, the less of it is tried.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

import aio

T = TypeVar("T")
OPERATIONS = ("read", "write", "mixed")
BLOCKS = (256 << 10, 1 << 20, 4 << 20)
DEPTHS = (4, 8, 16)
USUAL = (1 << 20, 8)  # block and depth at which backends are compared
PIECE_BYTES = 8 << 20
NUM_PIECES = 8
SAMPLE_S = 0.4
FILL_S = 12.0  # most time for writing the file; what is not written is not used
CLOSE = 0.97  # rates this near to each other are taken as equal
BACKEND_CLOSE = 0.9  # of backends: the first costs less CPU time
FALLEN = 0.8  # a rate below this share of the first one has fallen
LEAST_FILE_BYTES = 4 * PIECE_BYTES


@dataclass(frozen=True)
class Setting:
    """One point of the sweep."""

    operation: str
    backend: str
    block_bytes: int
    depth: int  # blocks in flight, reads and writes together

    @property
    def queue(self) -> QueueSetting:
        share = self.depth // 2 if self.operation == "mixed" else self.depth
        return QueueSetting(self.backend, self.block_bytes, share, share)


@dataclass(frozen=True)
class QueueSetting:
    """How a queue is opened."""

    backend: str
    block_bytes: int
    read_depth: int
    write_depth: int


@dataclass(frozen=True)
class Sample:
    """What a setting reached."""

    setting: Setting
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


def first_settings(backends: Sequence[str]) -> list[Setting]:
    """Every backend at the usual block and depth, there and back: the drive's mood changes."""
    order = [*backends, *reversed(backends)]
    return [Setting(operation, name, *USUAL) for name in order for operation in OPERATIONS]


def further_settings(backend: str) -> list[Setting]:
    """All blocks and depths; each pair for all operations before the next.

    The usual one again: a drive after a burst is not the drive before it.
    """
    return [
        Setting(operation, backend, block_bytes, depth)
        for block_bytes in BLOCKS
        for depth in DEPTHS
        for operation in OPERATIONS
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

    def fill(self, *, seconds: float = FILL_S) -> None:
        """Write the file once: first writes into reserved space are slower than others.

        After `seconds` it ends, and the file counts as long as it is written.
        """
        end = time.perf_counter() + seconds
        written = self.num_bytes
        with aio.Queue(read_depth=8, write_depth=8) as queue:
            tickets: deque[aio.Ticket] = deque()
            for index, offset in enumerate(range(0, self.num_bytes, PIECE_BYTES)):
                if len(tickets) == NUM_PIECES:
                    tickets.popleft().wait()
                if offset >= LEAST_FILE_BYTES and time.perf_counter() > end:
                    written = offset
                    break
                piece = self.pieces[index % NUM_PIECES]
                tickets.append(queue.write(self.file, piece, offset))
            for ticket in tickets:
                ticket.wait()
        self.num_bytes = written // (2 * PIECE_BYTES) * 2 * PIECE_BYTES


def sweep(
    target: Target, backends: Sequence[str], *, until: float, measured: Callable[[Setting], None]
) -> tuple[list[Sample], str]:
    """Measure until everything is known or `until` (of time.perf_counter) is over.

    Returns the best backend too.  The usual setting of the first one is measured in any case.
    `measured` is called before each.
    """
    samples: list[Sample] = []

    def take(points: Sequence[Setting], always: int = 0) -> None:
        for number, point in enumerate(points):
            if number < always or time.perf_counter() < until:
                measured(point)
                samples.append(measure(target, point, seconds=SAMPLE_S))

    take(first_settings(backends), always=len(OPERATIONS))
    backend = best_backend(samples, backends)
    take(further_settings(backend))
    return samples, backend


def best_backend(samples: Sequence[Sample], backends: Sequence[str]) -> str:
    """The first one that is about as fast as any, by the better of its samples."""
    rates: dict[tuple[str, str], float] = {}
    for sample in samples:
        key = sample.setting.backend, sample.setting.operation
        rates[key] = max(sample.bytes_per_s, rates.get(key, 0.0))
    whole = [name for name in backends if all((name, op) in rates for op in OPERATIONS)]
    means = [_product(rates[name, op] for op in OPERATIONS) for name in whole]
    return _first_close(whole, means, share=BACKEND_CLOSE)


def choose(samples: Sequence[Sample], backend: str) -> QueueSetting:
    """The smallest blocks and depths that are about as fast as any, reads and writes apart."""
    rates = {
        (s.setting.block_bytes, s.setting.operation, s.setting.depth): s.bytes_per_s
        for s in samples
        if s.setting.backend == backend
    }

    def depths(block: int, operation: str) -> list[int]:
        return sorted(depth for b, op, depth in rates if (b, op) == (block, operation))

    def top(block: int, operation: str) -> float:
        return max(rates[block, operation, depth] for depth in depths(block, operation))

    def depth_of(operation: str) -> int:
        found = depths(block, operation)
        return _first_close(found, [rates[block, operation, depth] for depth in found])

    blocks = sorted(
        block for block in {key[0] for key in rates} if all(depths(block, op) for op in OPERATIONS)
    )
    scores = [_product(top(block, op) for op in OPERATIONS) for block in blocks]
    block = _first_close(blocks, scores)
    return QueueSetting(backend, block, depth_of("read"), depth_of("write"))


def _product(rates: Iterable[float]) -> float:
    """The geometric mean: no operation outweighs another by being faster."""
    numbers = list(rates)
    return math.prod(numbers) ** (1 / len(numbers))


def _first_close(names: Sequence[T], rates: Sequence[float], share: float = CLOSE) -> T:
    least = share * max(rates)
    return next(name for name, rate in zip(names, rates, strict=True) if rate >= least)


def measure(target: Target, setting: Setting, *, seconds: float) -> Sample:
    """Keep transfers in flight for `seconds`; the time until the last one ends counts."""
    ends = run(target, setting.operation, setting.queue, seconds=seconds)
    return Sample(setting, len(ends) * PIECE_BYTES, ends[-1])


def sustain(target: Target, setting: QueueSetting, *, seconds: float) -> list[float]:
    """Write for `seconds`; bytes per second in each of 8 to 60 equal parts of that time."""
    ends = run(target, "write", setting, seconds=seconds)
    counts = [0] * min(60, max(8, int(ends[-1])))
    for end in ends:
        counts[min(int(end / ends[-1] * len(counts)), len(counts) - 1)] += 1
    return [count * PIECE_BYTES / (ends[-1] / len(counts)) for count in counts]


def fall(rates: Sequence[float]) -> tuple[float, float] | None:
    """(rate at first, rate at last) of a drive that is slower after its burst, else None."""
    first = median(rates[: max(2, len(rates) // 10)])
    last = median(rates[-max(2, len(rates) // 4) :])
    return (first, last) if last < FALLEN * first else None


def run(
    target: Target, operation: str, setting: QueueSetting, *, seconds: float
) -> list[float]:  # when each piece had ended, from the start
    with aio.Queue(
        setting.backend, block_bytes=setting.block_bytes,
        read_depth=setting.read_depth, write_depth=setting.write_depth,
    ) as queue:  # fmt: skip
        queue.register(target.buffer)
        tickets: deque[aio.Ticket] = deque()
        ends: list[float] = []
        start = time.perf_counter()

        def end_oldest() -> None:
            tickets.popleft().wait()
            ends.append(time.perf_counter() - start)

        for index, (writes, offset) in enumerate(transfers(operation, target.num_bytes)):
            if len(tickets) == NUM_PIECES:
                end_oldest()
                if ends[-1] >= seconds:
                    break
            submit = queue.write if writes else queue.read
            tickets.append(submit(target.file, target.pieces[index % NUM_PIECES], offset))
        while tickets:
            end_oldest()
        return ends


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
