"""What a drive can do wrong, at every block: the right ticket tells it and nothing hangs."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import aio
from aio.faults import Fault, Faults

BLOCK = 4096
SIZE = 3 * BLOCK + 100  # per transfer: a direct part, and an end through the page cache
NUM_TRANSFERS = 4
NUM_BLOCKS = NUM_TRANSFERS * 4  # per direction


@pytest.fixture
def queue() -> Iterator[aio.Queue]:
    with aio.Queue("faults", block_bytes=BLOCK, read_depth=3, write_depth=3) as queue:
        yield queue


@pytest.fixture
def file(tmp_path: Path) -> Iterator[aio.File]:
    with aio.File(tmp_path / "file", "x+", size=NUM_TRANSFERS * 4 * BLOCK) as file:
        yield file


def run(
    queue: aio.Queue, file: aio.File, operation: str, buffer: aio.Buffer
) -> list[aio.IOFailed | None]:
    """Move all transfers; what each ticket said."""
    outcome: list[aio.IOFailed | None] = []
    view = buffer.view
    for ticket in queue.submit(
        [
            aio.Request(operation, file, view[4 * BLOCK * i :][:SIZE], 4 * BLOCK * i)
            for i in range(NUM_TRANSFERS)
        ]
    ):
        try:
            ticket.wait()
            outcome.append(None)
        except aio.IOFailed as error:
            outcome.append(error)
    return outcome


def noise(buffer: aio.Buffer) -> bytes:
    buffer.view[:] = np.random.default_rng(1).bytes(len(buffer))
    return bytes(buffer.view)


def pieces(data: bytes) -> list[bytes]:
    return [data[4 * BLOCK * i :][:SIZE] for i in range(NUM_TRANSFERS)]


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_an_error_at_any_block_fails_its_own_ticket_only(
    queue: aio.Queue, file: aio.File, tmp_path: Path, operation: str, number: int
) -> None:
    faults = Faults(queue)
    with aio.Buffer(NUM_TRANSFERS * 4 * BLOCK) as buffer:
        data = noise(buffer)
        (tmp_path / "file").write_bytes(data)
        hit = set()
        for n in range(NUM_BLOCKS):
            submitted = len(faults.log())
            faults.inject(Fault.error(submitted + n, number))
            outcome = run(queue, file, operation, buffer)
            failed = [i for i, error in enumerate(outcome) if error]
            block = faults.log()[submitted + n]
            assert failed == [block.offset // (4 * BLOCK)]
            error = outcome[failed[0]]
            assert error is not None
            assert (error.errno, error.operation, error.path) == (number, operation, file.path)
            assert error.offset == block.offset
            assert error.wanted == SIZE
            assert 0 <= error.done <= SIZE - block.num_bytes
            assert error.done % BLOCK in (0, SIZE % BLOCK)
            hit.add(block.offset)
        assert len(hit) == NUM_BLOCKS
        faults.inject()
        assert run(queue, file, operation, buffer) == [None] * NUM_TRANSFERS
        assert bytes(buffer.view) == data


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: Fault.short(n, 1),
        lambda n: Fault.short(n, 511),
        lambda n: Fault.short(n, 512),
        lambda n: Fault.short(n, BLOCK - 1),
        lambda n: Fault.error(n, errno.EINTR),
        lambda n: Fault.error(n, errno.EAGAIN),
        lambda n: Fault.delay(n, 2),
    ],
    ids=["short 1", "short 511", "short 512", "short 4095", "EINTR", "EAGAIN", "delay"],
)
def test_a_stumble_at_any_block_changes_nothing(
    queue: aio.Queue,
    file: aio.File,
    tmp_path: Path,
    operation: str,
    make: Callable[[int], Fault],
) -> None:
    faults = Faults(queue)
    with aio.Buffer(NUM_TRANSFERS * 4 * BLOCK) as buffer:
        data = noise(buffer)
        for n in range(NUM_BLOCKS):
            before = bytes(len(data)) if operation == "write" else data
            (tmp_path / "file").write_bytes(before)
            submitted = len(faults.log())
            faults.inject(make(submitted + n))
            if operation == "read":
                buffer.view[:] = bytes(len(data))
            assert run(queue, file, operation, buffer) == [None] * NUM_TRANSFERS
            retried = len(faults.log()) - submitted - NUM_BLOCKS
            assert retried <= 1
            if operation == "read":
                assert pieces(bytes(buffer.view)) == pieces(data)
            else:
                assert pieces((tmp_path / "file").read_bytes()) == pieces(data)


def test_a_drive_that_never_gets_ready_is_an_error_at_last(
    queue: aio.Queue, file: aio.File
) -> None:
    Faults(queue).inject(*(Fault.error(n, errno.EAGAIN) for n in range(1000)))
    with pytest.raises(aio.IOFailed) as failed:
        queue.write(file, bytes(BLOCK), 0).wait()
    assert failed.value.errno == errno.EAGAIN


def test_a_read_that_meets_the_end_tells_how_far_it_came(queue: aio.Queue, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * (2 * BLOCK + 100))
    with aio.File(path) as file:
        into = bytearray(4 * BLOCK)
        with pytest.raises(aio.IOFailed) as failed:
            queue.read(file, into, BLOCK).wait()
        assert failed.value.errno == errno.ENODATA
        assert failed.value.done == BLOCK + 100
        assert failed.value.wanted == 4 * BLOCK
        assert into[: BLOCK + 100] == b"x" * (BLOCK + 100)
        with pytest.raises(aio.IOFailed) as failed:
            queue.read(file, into, 100 * BLOCK).wait()
        assert (failed.value.done, failed.value.offset) == (0, 100 * BLOCK)


def test_the_message_names_operation_path_place_and_what_to_do(
    queue: aio.Queue, file: aio.File
) -> None:
    Faults(queue).inject(Fault.error(1, errno.ENOSPC))
    ticket = queue.write(file, bytes(2 * BLOCK), 8192)
    for _ in range(2):  # every wait raises
        with pytest.raises(aio.IOFailed) as failed:
            ticket.wait()
    assert str(failed.value) == (
        f"write on '{file.path}' at byte 12288: expected 8192 bytes, got 4096 "
        "(ENOSPC: No space left on device). "
        "Free space on that file system, or use a path with more."
    )
    copy = pickle.loads(pickle.dumps(failed.value))
    assert (str(copy), copy.done) == (str(failed.value), 4096)


def test_a_zero_length_result_of_a_write_is_an_error(queue: aio.Queue, file: aio.File) -> None:
    Faults(queue).inject(Fault.short(0, 0))
    with pytest.raises(aio.IOFailed) as failed:
        queue.write(file, bytes(BLOCK), 0).wait()
    assert failed.value.errno == errno.EIO


def test_the_controls_refuse_a_real_queue() -> None:
    with aio.Queue("threads") as queue, pytest.raises(ValueError, match="faults"):
        Faults(queue)
