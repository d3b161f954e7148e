"""Hostile surroundings, each in its own process: forks, exits, signals, blocked calls, limits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import ctypes, errno, gc, os, resource, struct, sys, threading
import aio
from aio.faults import Faults

def block_call(number, error):
    \"\"\"From now on the system call `number` fails with `error` in this process (seccomp).\"\"\"
    libc = ctypes.CDLL(None, use_errno=True)
    allow, refuse = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50000 | error)
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), refuse, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    program = Program(len(steps), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0

def links():
    places = (f"/proc/self/fd/{n}" for n in range(3, 64))
    return [os.readlink(place) if os.path.exists(place) else "" for place in places]

def round_trip(queue, file):
    data = bytes(range(256)) * 64
    into = bytearray(len(data))
    queue.write(file, data, 0).wait()
    queue.read(file, into, 0).wait()
    assert into == data
"""
IO_URING_SETUP = 425
IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine())
root = pytest.mark.skipif(os.geteuid() != 0, reason="dropping to an ordinary user needs root")


def run(code: str, *args: object) -> str:
    """The standard output of `code`; it must exit with 0 and say nothing on standard error."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.skipif(
    "TSAN_OPTIONS" in os.environ, reason="ThreadSanitizer allows no threads in a child after fork"
)
def test_a_child_after_fork_cannot_touch_the_queue_and_the_parent_goes_on(
    backend: str, path: Path
) -> None:
    out = run(
        """
backend, path = sys.argv[1:]
buffer = aio.Buffer(1 << 20)
queue = aio.Queue(backend, block_bytes=4096)
queue.register(buffer)
file = aio.File(path, "x+", size=1 << 20)
round_trip(queue, file)
ticket = queue.read(file, buffer, 0)
for leave in (os._exit, sys.exit):
    child = os.fork()
    if child == 0:
        calls = [
            lambda: queue.read(file, bytearray(10), 0), lambda: queue.native, queue.stats,
            ticket.wait, ticket.done, ticket.cancel, lambda: buffer.view,
        ]
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                assert "after fork" in str(error), error
            else:
                leave(1)
        assert not any("io_uring" in link or "eventfd" in link for link in links()), links()
        assert os.pread(file.fileno(), 3, 0) == bytes([0, 1, 2])
        queue.close()
        file.close()
        del ticket, queue, buffer
        gc.collect()
        with aio.Queue(backend) as own, aio.File(path, "r+") as again:
            round_trip(own, again)
        leave(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
ticket.wait()
round_trip(queue, file)
print("parent ok")
""",
        backend,
        path,
    )
    assert out == "parent ok\n"


def test_leaving_the_interpreter_with_transfers_in_flight_is_silent(
    backend: str, path: Path
) -> None:
    run(
        """
backend, path = sys.argv[1:]
file = aio.File(path, "x+", size=64 << 20)
queue = aio.Queue(backend)
buffer = aio.Buffer(64 << 20)
tickets = [queue.write(file, buffer, 0) for _ in range(4)]
queue.read(file, bytearray(1 << 20), 0)
""",
        backend,
        path,
    )


def test_an_exception_with_transfers_in_flight_is_the_only_message(
    backend: str, path: Path
) -> None:
    run(
        """
backend, path = sys.argv[1:]
try:
    with aio.Queue(backend) as queue, aio.File(path, "x+", size=8 << 20) as file:
        queue.write(file, bytes(8 << 20), 0)
        raise KeyError("mine")
except KeyError:
    pass
""",
        backend,
        path,
    )


def test_a_signal_reaches_python_while_a_ticket_is_waited_for(path: Path) -> None:
    out = run(
        """
import signal
queue = aio.Queue("faults")
faults = Faults(queue)
faults.allow(0)
file = aio.File(sys.argv[1], "x+", size=4096)
ticket = queue.read(file, bytearray(4096), 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
waiting = threading.Event()
def interrupt():
    waiting.wait()
    faults.wait_submitted(1)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    waiting.set()
    ticket.wait()
except KeyboardInterrupt:
    print("interrupted")
faults.allow()
ticket.wait()
""",
        path,
    )
    assert out == "interrupted\n"


def test_without_io_uring_the_next_backend_is_chosen_and_the_reason_told(path: Path) -> None:
    out = run(
        f"""
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
block_call({IO_URING_SETUP}, errno.EPERM)
found = aio.probe(os.path.dirname(sys.argv[1]))
print(found.backends["uring"], found.backend, found.registration)
with aio.Queue() as queue, aio.File(sys.argv[1], "x+", size=65536) as file:
    assert not queue.register(aio.Buffer(4096))
    round_trip(queue, file)
aio.Queue().close()
try:
    aio.Queue("uring")
except OSError as error:
    print(error.errno == errno.EPERM, error)
""",
        path,
    )
    assert "EPERM: Operation not permitted libaio needs io_uring, got EPERM" in out
    assert out.count("io_uring is not available (aio.probe() tells why): using libaio") == 1
    assert "True [Errno 1] aio backend 'uring': expected it to work here, got EPERM" in out


@pytest.mark.skipif(IO_SETUP is None, reason="the number of io_setup is not known here")
def test_with_neither_ring_nor_kernel_aio_threads_do_it(path: Path) -> None:
    """EAGAIN is what io_setup says when fs.aio-max-nr is exhausted."""
    out = run(
        f"""
block_call({IO_URING_SETUP}, errno.ENOSYS)
block_call({IO_SETUP}, errno.EAGAIN)
print(aio.probe().backends)
import logging
logging.disable()
with aio.Queue() as queue, aio.File(sys.argv[1], "x+", size=65536) as file:
    assert queue.backend == "threads"
    round_trip(queue, file)
""",
        path,
    )
    assert "'uring': 'ENOSYS: Function not implemented'" in out
    assert "'libaio': 'EAGAIN: Resource temporarily unavailable', 'threads': None" in out


@root
def test_an_ordinary_user_who_may_lock_nothing_works_without_registration(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    for parent in tmp_path.parents[:2]:
        os.chmod(parent, 0o755)
    out = run(
        """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.chdir(sys.argv[1])
os.setgid(65534), os.setuid(65534)
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
print(aio.probe().registration, aio.probe().memlock_bytes)
with aio.Queue("uring") as queue, aio.Buffer(8 << 20) as buffer:
    assert not queue.register(buffer)
    with aio.File("relative", "x+", size=8 << 20) as file:  # a relative path
        buffer.view[:] = os.urandom(1 << 20) * 8
        queue.write(file, buffer, 0).wait()
        into = aio.Buffer(8 << 20)
        queue.read(file, into, 0).wait()
        assert into.view == buffer.view
""",
        tmp_path,
    )
    assert out == (
        "ENOMEM: Cannot allocate memory 65536\n"
        "an I/O buffer of 8388608 bytes could not be registered (ENOMEM: Cannot allocate memory): "
        "transfers cost more CPU time. Raise ulimit -l\n"
    )


def test_a_ring_that_is_lost_fails_every_ticket_and_hangs_none(path: Path) -> None:
    out = run(
        """
queue = aio.Queue("uring", block_bytes=4096)
file = aio.File(sys.argv[1], "x+", size=1 << 20)
round_trip(queue, file)
ring = next(3 + i for i, link in enumerate(links()) if "io_uring" in link)
os.dup2(os.open("/dev/null", os.O_RDWR), ring)
for _ in range(3):
    tickets = [queue.read(file, bytearray(1 << 20), 0) for _ in range(4)]
    for ticket in tickets:
        try:
            ticket.wait()
        except aio.IOFailed as error:
            print(error.errno in (errno.EOPNOTSUPP, errno.EBADF))
import logging
logging.disable()
assert not queue.register(aio.Buffer(4096))
queue.close()
""",
        path,
    )
    assert out.count("True") >= 8
    assert "False" not in out


def test_a_probe_tells_what_a_path_offers(tmp_path: Path) -> None:
    out = run(
        """
found = aio.probe(sys.argv[1])
print(found.direct, found.alignment >= 512, found.path_error, os.listdir(sys.argv[1]))
print(aio.probe(sys.argv[1] + "/missing").path_error)
print(aio.probe().direct)
""",
        tmp_path,
    )
    assert out == "True True None []\nENOENT: No such file or directory\nNone\n"
