"""What is written is what is read, and nothing else changes: all sizes, alignments, backends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aio

BLOCK = 4096
FILE_BYTES = 8 * BLOCK
UNTOUCHED = 0xA5


def borders(*places: int) -> set[int]:
    """Sizes around `places`, down to 1."""
    return {place + off for place in places for off in (-2, -1, 0, 1, 2) if place + off > 0}


SIZES = sorted(
    borders(0, 512, BLOCK, BLOCK + 512, 2 * BLOCK, 3 * BLOCK) - {3 * BLOCK + 2}
    | set(random.Random(1).sample(range(1, 3 * BLOCK), 40))
)


@pytest.fixture
def memory() -> Iterator[aio.Buffer]:
    with aio.Buffer(2 * FILE_BYTES) as buffer:
        yield buffer


def noise(num_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def round_trip(
    queue: aio.Queue, file: aio.File, out: memoryview, into: memoryview, at: int
) -> None:
    """Write `out` at `at`, read it back, and compare the whole file with what it must hold."""
    expected = bytearray(Path(file.path).read_bytes())
    expected[at : at + len(out)] = out
    queue.write(file, out, at).wait()
    queue.read(file, into, at).wait()
    assert into == out
    assert Path(file.path).read_bytes() == expected


def new_file(path: Path, *, direct: bool) -> aio.File:
    path.write_bytes(bytes([UNTOUCHED]) * FILE_BYTES)
    return aio.File(path, "r+", direct=direct)


@pytest.mark.parametrize("direct", [True, False])
def test_every_size_from_one_byte_to_three_blocks_and_one_comes_back(
    queue: aio.Queue, path: Path, memory: aio.Buffer, direct: bool
) -> None:
    view = memory.view
    with new_file(path, direct=direct) as file:
        assert file.direct is direct
        for size in SIZES:
            view[:size] = noise(size, size)
            round_trip(queue, file, view[:size], view[FILE_BYTES : FILE_BYTES + size], 0)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 64, 512])
def test_any_offset_around_a_block_border_is_exact(
    queue: aio.Queue, path: Path, memory: aio.Buffer, direct: bool, shift: int
) -> None:
    """`shift` moves the memory against the file: aligned together, or not at all."""
    view = memory.view
    with new_file(path, direct=direct) as file:
        for offset in (1, 511, 512, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 513):
            for size in (1, 513, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 1):
                start = (offset + shift) % BLOCK
                out = view[start : start + size]
                out[:] = noise(size, offset + size)
                into = view[FILE_BYTES + start : FILE_BYTES + start + size]
                round_trip(queue, file, out, into, offset)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    offset=st.integers(0, 4 * BLOCK),
    size=st.integers(1, 4 * BLOCK),
    start=st.integers(0, BLOCK),
    direct=st.booleans(),
)
def test_random_places_are_exact(
    queue: aio.Queue, path: Path, offset: int, size: int, start: int, direct: bool
) -> None:
    with new_file(path, direct=direct) as file, aio.Buffer(2 * FILE_BYTES) as buffer:
        out = buffer.view[start : start + size]
        out[:] = noise(size, size)
        round_trip(queue, file, out, buffer.view[FILE_BYTES : FILE_BYTES + size], offset)


def test_a_growing_file_takes_writes_beyond_its_end(queue: aio.Queue, path: Path) -> None:
    data = noise(3 * BLOCK + 77, 5)
    with aio.File(path, "x+") as file:
        queue.write(file, data, 100).wait()
        assert file.size == 100 + len(data)
        assert path.read_bytes() == bytes(100) + data


def test_memory_files_without_direct_io_work(queue: aio.Queue) -> None:
    path = Path("/dev/shm") / f"aio-test-{id(queue)}"
    try:
        with aio.File(path, "x+", direct=False) as file:
            data = noise(5 * BLOCK + 3, 6)
            into = bytearray(len(data))
            queue.write(file, data, 7).wait()
            queue.read(file, into, 7).wait()
            assert into == data
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("registered", [True, False])
def test_many_transfers_in_one_call_keep_to_their_places(
    backend: str, path: Path, registered: bool
) -> None:
    sizes = [1, 100, 4096, 5000, 8192, 12289, 65536] * 20
    offsets = np.cumsum([0, *sizes])
    total = int(offsets[-1])
    with (
        aio.Buffer(2 * total) as buffer,
        aio.File(path, "x+", size=total) as file,
        aio.Queue(backend, block_bytes=8192) as queue,
    ):
        if registered:
            assert queue.register(buffer) is (backend == "uring")
        view = buffer.view
        view[:total] = noise(total, 7)
        spans = [
            (int(start), int(start) + size) for start, size in zip(offsets, sizes, strict=False)
        ]
        writes = [aio.Request("write", file, view[a:b], a) for a, b in spans]
        reads = [aio.Request("read", file, view[total + a : total + b], a) for a, b in spans]
        for requests in (writes, reads):
            for ticket in queue.submit(requests):
                ticket.wait()
        assert view[total:] == view[:total]
        assert path.read_bytes() == view[:total]
