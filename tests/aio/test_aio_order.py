"""Who goes first: the order in which blocks reach the drive, on one that stands still on demand."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import aio
from aio.faults import Faults

BLOCK = 1 << 20
DEPTH = 8
ANYWHERE = 1 << 30  # an address: with skip_io nothing is read or written
GIB = 1 << 30


@pytest.fixture
def queue() -> Iterator[aio.Queue]:
    with aio.Queue("faults", block_bytes=BLOCK, read_depth=DEPTH, write_depth=DEPTH) as queue:
        yield queue


@pytest.fixture
def faults(queue: aio.Queue) -> Iterator[Faults]:
    faults = Faults(queue)
    faults.skip_io()
    faults.allow(0)
    yield faults
    if not queue.closed:
        faults.allow()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[aio.File]:
    with aio.File(tmp_path / "file", "x+") as file:
        yield file


def test_an_urgent_read_waits_for_at_most_the_blocks_in_flight(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    slow = queue.read(file, (ANYWHERE, 4 * GIB), 0, deadline=100)
    faults.wait_submitted(DEPTH)
    urgent = queue.read(file, (ANYWHERE, 8 * BLOCK), 8 * GIB, deadline=1)
    faults.allow()
    urgent.wait()
    slow.wait()
    log = faults.log()
    assert len(log) == 4 * GIB // BLOCK + 8
    first = next(i for i, block in enumerate(log) if block.offset >= 8 * GIB)
    assert first == DEPTH
    assert [block.offset for block in log[first : first + 8]] == [
        8 * GIB + i * BLOCK for i in range(8)
    ]


def test_blocks_leave_by_deadline_and_ties_in_the_order_of_submission(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    # The first transfer fills the share, so that all others are sorted before any of them starts.
    tickets = [queue.read(file, (ANYWHERE, DEPTH * BLOCK), 0, deadline=0)]
    faults.wait_submitted(DEPTH)
    deadlines = [random.Random(3).randrange(5) for _ in range(300)]
    tickets += queue.submit(
        [
            aio.Request("read", file, (ANYWHERE, 2 * BLOCK), (1 + i) * GIB, deadline)
            for i, deadline in enumerate(deadlines)
        ]
    )
    faults.allow()
    for ticket in tickets:
        ticket.wait()
    started = [block.offset // GIB - 1 for block in faults.log()[DEPTH:]]
    expected = [i for i in sorted(range(300), key=deadlines.__getitem__) for _ in range(2)]
    assert started == expected


def test_a_full_share_of_writes_does_not_hold_up_a_read(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    write = queue.write(file, (ANYWHERE, GIB), 0)
    faults.wait_submitted(DEPTH)
    read = queue.read(file, (ANYWHERE, BLOCK), 2 * GIB)
    faults.wait_submitted(DEPTH + 1)  # although no write has ended
    assert faults.log()[DEPTH].operation == "read"
    assert not write.done()
    faults.allow()
    read.wait()
    write.wait()


def test_a_slow_drive_does_not_hold_up_another(tmp_path: Path) -> None:
    with (
        aio.Queue(
            "faults", block_bytes=BLOCK, read_depth=DEPTH, write_depth=DEPTH, num_drives=2
        ) as queue,
        aio.File(tmp_path / "slow", "x+", drive=0) as slow,
        aio.File(tmp_path / "fast", "x+", drive=1) as fast,
    ):
        faults = Faults(queue)
        faults.skip_io()
        faults.allow(0)
        first = queue.read(slow, (ANYWHERE, GIB), 0, deadline=1)
        faults.wait_submitted(DEPTH)
        second = queue.read(fast, (ANYWHERE, GIB), GIB, deadline=2)
        faults.wait_submitted(2 * DEPTH)  # although no read of the slow drive has ended
        assert {block.offset // GIB for block in faults.log()[DEPTH:]} == {1}
        faults.allow()
        first.wait()
        second.wait()


def test_a_queue_of_one_drive_takes_the_files_of_any(tmp_path: Path) -> None:
    with aio.Queue() as queue, aio.File(tmp_path / "file", "x+", drive=7) as file:
        queue.write(file, b"x" * BLOCK, 0).wait()
        assert file.size == BLOCK


def test_never_more_than_the_depth_is_in_flight(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    ticket = queue.read(file, (ANYWHERE, 64 * BLOCK), 0)
    faults.wait_submitted(DEPTH)
    for ended in range(1, 20):
        faults.allow(1)
        faults.wait_submitted(DEPTH + ended)
        assert len(faults.log()) == DEPTH + ended
    faults.allow()
    ticket.wait()


def test_cancelling_drops_what_is_not_submitted(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    running = queue.read(file, (ANYWHERE, GIB), 0)
    faults.wait_submitted(DEPTH)
    waiting = queue.read(file, (ANYWHERE, GIB), GIB)
    assert waiting.cancel()
    with pytest.raises(aio.IOFailed, match="cancelled") as failed:
        waiting.wait()  # ends although the drive stands still
    assert failed.value.done == 0
    assert failed.value.offset == GIB
    assert running.cancel()
    assert not running.cancel()
    assert not running.done()
    faults.allow()
    with pytest.raises(aio.IOFailed) as failed:
        running.wait()
    assert failed.value.done == DEPTH * BLOCK
    assert len(faults.log()) == DEPTH


def test_cancelling_in_any_order_leaves_the_others_in_order(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    first = queue.read(file, (ANYWHERE, DEPTH * BLOCK), 0)
    faults.wait_submitted(DEPTH)
    rng = random.Random(4)
    deadlines = [rng.randrange(1000) for _ in range(200)]
    tickets = [
        queue.read(file, (ANYWHERE, BLOCK), (1 + i) * GIB, deadline=deadline)
        for i, deadline in enumerate(deadlines)
    ]
    cancelled = set(rng.sample(range(200), 120))
    for i in rng.sample(sorted(cancelled), 120):
        assert tickets[i].cancel()
    faults.allow()
    first.wait()
    kept = [i for i in range(200) if i not in cancelled]
    for i in kept:
        tickets[i].wait()
    started = [block.offset // GIB - 1 for block in faults.log()[DEPTH:]]
    assert started == sorted(kept, key=deadlines.__getitem__)


def test_an_ended_transfer_cannot_be_cancelled(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    faults.allow()
    ticket = queue.read(file, (ANYWHERE, BLOCK), 0)
    ticket.wait()
    assert not ticket.cancel()
    ticket.wait()


def test_blocks_may_end_in_any_order(queue: aio.Queue, file: aio.File, tmp_path: Path) -> None:
    data = bytes(range(256)) * (16 * BLOCK // 256)
    faults = Faults(queue)
    faults.inject(*(aio.faults.Fault.delay(n, num_blocks=(n * 5) % 7) for n in range(64)))
    into = bytearray(len(data))
    queue.write(file, data, 0).wait()
    queue.read(file, into, 0).wait()
    assert into == data == (tmp_path / "file").read_bytes()


def test_closing_cancels_what_waits_and_keeps_tickets_valid(
    queue: aio.Queue, faults: Faults, file: aio.File
) -> None:
    tickets = [queue.read(file, (ANYWHERE, GIB), i * GIB) for i in range(20)]
    faults.wait_submitted(DEPTH)
    closing = threading.Thread(target=queue.close)
    closing.start()
    for ticket in tickets[1:]:
        with pytest.raises(aio.IOFailed) as failed:
            ticket.wait()  # ends although the drive stands still
        assert (failed.value.errno, failed.value.done) == (errno.ECANCELED, 0)
    assert not tickets[0].done()
    faults.allow()
    closing.join()
    queue.close()
    with pytest.raises(aio.IOFailed) as failed:
        tickets[0].wait()
    assert (failed.value.errno, failed.value.done) == (errno.ECANCELED, DEPTH * BLOCK)
    for call in (lambda: queue.read(file, (ANYWHERE, BLOCK), 0), lambda: queue.native):
        with pytest.raises(ValueError, match="closed"):
            call()
