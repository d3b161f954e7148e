"""Who keeps what alive, and what happens when something is closed or dropped under a transfer."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import aio
from aio.faults import Fault, Faults

BLOCK = 4096


@pytest.fixture
def slow() -> Iterator[aio.Queue]:
    with aio.Queue("faults", block_bytes=BLOCK, read_depth=2, write_depth=2) as queue:
        yield queue


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_dropped_ticket_keeps_its_memory_until_the_transfer_ends(
    slow: aio.Queue, path: Path
) -> None:
    faults = Faults(slow)
    faults.allow(0)
    with aio.File(path, "x+", size=8 * BLOCK) as file:
        into = bytearray(8 * BLOCK)
        slow.read(file, into, 0)
        gc.collect()
        with pytest.raises(BufferError):
            into.clear()
        faults.allow()
        slow.read(file, bytearray(1), 0).wait()
        slow.close()
        into.clear()


def test_a_dropped_ticket_that_has_ended_lets_go_at_once(queue: aio.Queue, path: Path) -> None:
    with aio.File(path, "x+", size=BLOCK) as file:
        into = bytearray(BLOCK)
        ticket = queue.read(file, into, 0)
        ticket.wait()
        with pytest.raises(BufferError):
            into.clear()
        del ticket
        into.clear()


def test_a_ticket_outlives_its_queue(queue: aio.Queue, path: Path) -> None:
    with aio.File(path, "x+", size=BLOCK) as file:
        ticket = queue.write(file, b"y" * BLOCK, 0)
        ticket.wait()
        queue.close()
        ticket.wait()
        assert ticket.done()
        assert not ticket.cancel()


def test_a_collected_queue_ends_its_transfers(backend: str, path: Path) -> None:
    data = random.Random(5).randbytes(1 << 20)
    with aio.File(path, "x+", size=len(data)) as file:
        queue = aio.Queue(backend, block_bytes=1 << 20)
        queue.write(file, data, 0).wait()
        cycle: list[object] = [queue, queue.read(file, memoryview(bytearray(len(data))), 0)]
        cycle.append(cycle)
        before = descriptors()
        del queue, cycle
        gc.collect()
        after = descriptors()
        assert after < before or backend == "threads"
        assert not after - before


def test_a_cycle_with_views_in_transfer_can_be_collected(queue: aio.Queue, path: Path) -> None:
    with aio.File(path, "x+", size=BLOCK) as file, aio.Buffer(BLOCK) as buffer:
        for exporter in (bytearray(BLOCK), np.zeros(BLOCK, np.uint8), buffer.view):
            view = memoryview(exporter)[:512]
            cycle: list[object] = [aio.Request("read", file, view, 0), queue.read(file, view, 0)]
            cycle[1].wait()  # type: ignore[attr-defined]
            cycle.append(cycle)
        del cycle, view, exporter
        gc.collect()


def test_queues_give_back_their_descriptors(backend: str) -> None:
    before = descriptors()
    for _ in range(20):
        with aio.Queue(backend, block_bytes=BLOCK, read_depth=1, write_depth=1):
            pass
    assert descriptors() == before


def test_closing_a_file_under_load_fails_the_rest_and_touches_no_other_file(
    queue: aio.Queue, tmp_path: Path
) -> None:
    """The numbers of its descriptors are given to other files at once."""
    size, outcomes = 64 * BLOCK, set()
    for turn in range(20):
        file = aio.File(tmp_path / f"a{turn}", "x+", size=size)
        tickets = queue.submit([aio.Request("write", file, b"z" * size, 0) for _ in range(8)])
        file.close()
        with aio.File(tmp_path / f"b{turn}", "x+") as other:
            for ticket in tickets:
                try:
                    ticket.wait()
                    outcomes.add(0)
                except aio.IOFailed as error:
                    outcomes.add(error.errno)
            assert other.size == 0
        file.close()
    assert errno.EBADF in outcomes
    assert outcomes <= {0, errno.EBADF}


def test_closing_a_file_waits_for_the_blocks_in_flight(slow: aio.Queue, path: Path) -> None:
    faults = Faults(slow)
    faults.allow(0)
    file = aio.File(path, "x+", size=8 * BLOCK)
    ticket = slow.write(file, b"q" * 8 * BLOCK, 0)
    faults.wait_submitted(2)
    number = file.fileno()
    closing = threading.Thread(target=file.close)
    closing.start()
    while not file.closed:
        pass
    os.fstat(number)  # still open: two blocks use it
    faults.allow()
    closing.join()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    with pytest.raises(aio.IOFailed) as failed:
        ticket.wait()
    assert (failed.value.errno, failed.value.done) == (errno.EBADF, 2 * BLOCK)


def test_many_threads_share_a_queue(queue: aio.Queue, path: Path) -> None:
    num_threads, num_turns, span = 8, 40, 32 * BLOCK
    failures: list[BaseException] = []

    def work(file: aio.File, number: int) -> None:
        rng, base = random.Random(number), number * span
        try:
            mirror = bytearray(span)
            for _ in range(num_turns):
                start = rng.randrange(span)
                data = rng.randbytes(rng.randrange(1, span - start + 1))
                mirror[start : start + len(data)] = data
                into = bytearray(span)
                queue.write(file, data, base + start, deadline=rng.randrange(9)).wait()
                queue.read(file, into, base, deadline=rng.randrange(9)).wait()
                assert into == mirror
        except BaseException as error:
            failures.append(error)

    with aio.File(path, "x+", size=num_threads * span) as file:
        threads = [threading.Thread(target=work, args=(file, i)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_submitting_and_cancelling_from_many_threads_ends_every_ticket(
    queue: aio.Queue, path: Path
) -> None:
    with aio.File(path, "x+", size=64 * BLOCK) as file:
        outcomes: list[int] = []

        def work(number: int) -> None:
            rng = random.Random(number)
            for _ in range(60):
                tickets = queue.submit(
                    [
                        aio.Request("read", file, bytearray(16 * BLOCK), 0, rng.randrange(5))
                        for _ in range(4)
                    ]
                )
                for ticket in rng.sample(tickets, 4):
                    ticket.cancel()
                for ticket in tickets:
                    try:
                        ticket.wait()
                        outcomes.append(0)
                    except aio.IOFailed as error:
                        outcomes.append(error.errno or -1)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 4 * 60 * 4
        assert set(outcomes) <= {0, errno.ECANCELED}
        assert errno.ECANCELED in outcomes


def test_waiting_with_a_timeout_gives_up_and_can_be_repeated(slow: aio.Queue, path: Path) -> None:
    faults = Faults(slow)
    faults.allow(0)
    with aio.File(path, "x+", size=BLOCK) as file:
        ticket = slow.read(file, bytearray(BLOCK), 0)
        for timeout in (0, 1e-3):
            with pytest.raises(TimeoutError, match="expected an end within"):
                ticket.wait(timeout)
        faults.allow()
        ticket.wait(60)


def test_statistics_count_every_byte_and_block(path: Path) -> None:
    for keep_stats in (True, False):
        with (
            aio.Queue("faults", block_bytes=BLOCK, keep_stats=keep_stats) as queue,
            aio.File(path, "r+" if path.exists() else "x+", size=4 * BLOCK) as file,
        ):
            Faults(queue).inject(Fault.short(1, 100))
            queue.write(file, bytes(4 * BLOCK), 0).wait()
            with pytest.raises(aio.IOFailed):
                queue.read(file, bytearray(2 * BLOCK), 3 * BLOCK).wait()
            stats = queue.stats()
        assert (stats.write.num_bytes, stats.write.num_blocks) == (4 * BLOCK, 4)
        assert (stats.read.num_bytes, stats.read.num_blocks) == (BLOCK, 2)
        for flow in (stats.read, stats.write):
            assert sum(flow.latency) == (flow.num_blocks if keep_stats else 0)
            assert (flow.busy_s > 0) is keep_stats
            assert (1 <= flow.mean_depth <= 8) is keep_stats


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (lambda q, f: q.read(f, b"readonly", 0), TypeError, "writable"),
        (lambda q, f: q.read(f, np.zeros((4, 4))[:, 1], 0), TypeError, "contiguous"),
        (lambda q, f: q.write(f, 7, 0), TypeError, "int"),
        (lambda q, f: q.write(f, (1, 2, 3), 0), TypeError, "address, num_bytes"),
        (lambda q, f: q.write(f, (0, 5), 0), ValueError, "address > 0"),
        (lambda q, f: q.write(f, b"x", -1), ValueError, "offset"),
        (lambda q, f: q.write(f, b"x", 2**63), ValueError, "offset"),
        (lambda q, f: q.submit([aio.Request("erase", f, b"x", 0)]), ValueError, "'erase'"),
    ],
)
def test_nonsense_is_refused_before_it_reaches_c(
    slow: aio.Queue, path: Path, bad, error: type[Exception], words: str
) -> None:
    with aio.File(path, "x+", size=BLOCK) as file:
        with pytest.raises(error, match=words):
            bad(slow, file)
        assert Faults(slow).log() == []


@pytest.mark.parametrize(
    "config", [{"block_bytes": 0}, {"block_bytes": 1000}, {"read_depth": 0}, {"write_depth": 5000}]
)
def test_a_queue_refuses_a_senseless_configuration(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        aio.Queue("threads", **config)


def test_an_unknown_backend_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'uring', 'libaio', 'threads', got 'posix'"):
        aio.Queue("posix")


def test_an_empty_transfer_ends_at_once(queue: aio.Queue, path: Path) -> None:
    with aio.File(path, "x+") as file:
        queue.write(file, b"", 100).wait()
        queue.read(file, bytearray(), 100).wait()
        assert queue.submit([]) == []
        assert file.size == 0


def test_a_closed_files_number_belongs_to_the_next_file_at_once(
    queue: aio.Queue, tmp_path: Path
) -> None:
    """A queue may have registered the descriptor: the first file must leave its table."""
    first, second = tmp_path / "first", tmp_path / "second"
    for path, letter in ((first, b"a"), (second, b"b")):
        with aio.File(path, "x+") as file:
            numbers = file.native.direct_fd, file.native.buffered_fd
            queue.write(file, letter * 4196, 0).wait()  # a direct and a buffered block
    with aio.File(second) as file:
        assert (file.native.direct_fd, file.native.buffered_fd) == numbers
    assert (first.read_bytes(), second.read_bytes()) == (b"a" * 4196, b"b" * 4196)


@pytest.mark.skipif(
    "TSAN_OPTIONS" in os.environ, reason="ThreadSanitizer allows no threads in a child after fork"
)
def test_an_inherited_files_number_belongs_to_the_next_file_of_the_child(
    backend: str, slow: aio.Queue, tmp_path: Path
) -> None:
    """Nor does the child wait for what its parent has in flight."""
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(name.encode() * BLOCK)
    with aio.File(tmp_path / "first") as file:
        Faults(slow).allow(0)
        held = slow.read(file, bytearray(BLOCK), 0)
        Faults(slow).wait_submitted(1)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            into = bytearray(2 * BLOCK)
            with aio.Queue(backend) as own:
                own.read(file, into, 0).wait()
                numbers = file.native.direct_fd, file.native.buffered_fd
                file.close()
                with aio.File(tmp_path / "second") as other:
                    same = numbers == (other.native.direct_fd, other.native.buffered_fd)
                    own.read(other, into, 0).wait()
            os._exit(0 if same and into.startswith(b"second") else 1)
        status = os.waitpid(pid, 0)[1]
        Faults(slow).allow()
        held.wait()
        assert status == 0


@pytest.mark.skipif(
    "TSAN_OPTIONS" in os.environ, reason="ThreadSanitizer allows no threads in a child after fork"
)
def test_a_child_raises_at_once_while_its_parent_is_in_a_call(slow: aio.Queue, path: Path) -> None:
    """The fork copies the queue's lock as another thread holds it."""
    with aio.File(path, "x+", size=BLOCK) as file:
        faults = Faults(slow)
        faults.allow(0)
        held = slow.read(file, bytearray(BLOCK), 0)
        faults.wait_submitted(1)
        slow._lock.acquire()  # as in a call
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            refused = 0
            for call in (
                lambda: slow.read(file, bytearray(1), 0),
                lambda: slow.register(memoryview(bytearray(1))),
                slow.stats,
            ):
                with contextlib.suppress(RuntimeError):
                    call()
                    break
                refused += 1
            os._exit(refused != 3)
        slow._lock.release()
        status = os.waitpid(pid, 0)[1]
        faults.allow()
        held.wait()
        assert status == 0


def test_a_submission_that_is_interrupted_keeps_its_memory(
    slow: aio.Queue, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C right behind the call into C."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with aio.File(path, "x+", size=4 * BLOCK) as file:
        faults = Faults(slow)
        faults.allow(0)
        buffer = aio.Buffer(4 * BLOCK)
        address = buffer.address
        monkeypatch.setattr(slow, "_reap", interrupt)
        with pytest.raises(KeyboardInterrupt):
            slow.read(file, buffer, 0)
        monkeypatch.undo()
        buffer.close()
        del buffer
        gc.collect()
        kept = mapped(address)
        faults.allow()
        assert kept
        while mapped(address):
            slow.read(file, bytearray(1), 0).wait()


def test_registered_memory_is_kept_until_its_queue_is_closed(queue: aio.Queue, path: Path) -> None:
    """Else other memory at its address would be taken for it."""
    path.write_bytes(b"x" * BLOCK)
    with aio.File(path) as file:
        for _ in range(4):
            with aio.Buffer(BLOCK) as buffer:
                registered = queue.register(buffer)
                address = buffer.address
                ticket = queue.read(file, buffer, 0)
                ticket.wait()
                assert buffer.view[:BLOCK] == b"x" * BLOCK
            del ticket
    gc.collect()
    assert mapped(address) is registered
    queue.close()
    gc.collect()
    assert not mapped(address)


def test_what_closes_a_queue_at_exit_waits_for_calls_of_other_threads(
    queue: aio.Queue, path: Path
) -> None:
    with aio.File(path, "x+", size=BLOCK) as file:
        closer = threading.Thread(target=queue._finalizer)
        with queue._lock:  # as in a call
            closer.start()
            while queue._finalizer.alive:
                time.sleep(0.001)
            closer.join(0.1)
            assert closer.is_alive()
        closer.join()
        with pytest.raises(ValueError, match="closed"):
            queue.read(file, bytearray(1), 0)


def test_a_closed_file_is_let_go_while_its_queue_lives(queue: aio.Queue, tmp_path: Path) -> None:
    """What is deleted gives its space back: no queue keeps it open."""
    with aio.File(tmp_path / "file", "x+", size=64 << 20) as file:
        queue.write(file, bytes(4096), 0).wait()
        full = os.statvfs(tmp_path).f_bfree * os.statvfs(tmp_path).f_frsize
    (tmp_path / "file").unlink()
    for _ in range(500):  # others write on this disk too, and deleting may be put off
        free = os.statvfs(tmp_path).f_bfree * os.statvfs(tmp_path).f_frsize
        if free - full > 32 << 20:
            return
        time.sleep(0.02)
    raise AssertionError(f"{free - full} bytes came back")


@pytest.mark.skipif(
    "TSAN_OPTIONS" in os.environ, reason="ThreadSanitizer allows no threads in a child after fork"
)
def test_queues_in_a_child_do_not_wait_for_those_of_its_parent(tmp_path: Path) -> None:
    with aio.Queue() as queue, aio.File(tmp_path / "parent", "x+") as file:
        queue.write(file, bytes(4096), 0).wait()
        pid = os.fork()
        if pid == 0:
            with aio.Queue() as own, aio.File(tmp_path / "child", "x+") as mine:
                own.write(mine, b"c" * 4096, 0).wait()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        queue.write(file, b"p" * 4096, 0).wait()
    assert (tmp_path / "child").read_bytes() == b"c" * 4096
    assert (tmp_path / "parent").read_bytes() == b"p" * 4096
