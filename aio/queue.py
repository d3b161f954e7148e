"""The queue: transfers go in with a deadline, tickets come out.

    submit([Request, ...]) --one call--> C queue --blocks--> kernel
                                             `--> Ticket.wait()

Any thread may submit.  A child after fork has the object but not the queue: every call raises
there, close() does nothing.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aio.buffer import Buffer
from aio.file import File
from aio.log import tell_once
from aio.native import (
    BACKEND_NAMES,
    BACKENDS,
    BLOCK_MULTIPLE,
    MAX_BLOCKS_IN_FLIGHT,
    check_range,
    ffi,
    lib,
    memory_of,
    open_queue,
    strerror,
)
from aio.stats import Stats, flow_of
from aio.ticket import Ticket

Operation = Literal["read", "write"]
_OPS = {"read": lib.AIO_READ, "write": lib.AIO_WRITE}


@dataclass(frozen=True, slots=True)
class Request:
    """One transfer.

    `buffer`: contiguous, its size is the transfer's; `offset` in bytes; a smaller `deadline` (0 to
    2^64 - 1) is more urgent.
    """

    operation: Operation
    file: File
    buffer: object
    offset: int
    deadline: int = 0


MAX_DRIVES = int(lib.AIO_MAX_DRIVES)


class Queue:
    """A queue and its thread.  `backend`: "auto", "uring", "libaio" or "threads".

    `read_depth` and `write_depth` are blocks of `block_bytes` in flight on each drive, reads and
    writes apart; a file names its drive (`File(..., drive=1)`), and a slow drive never holds up
    another.  Raises OSError where the backend does not work here.
    """

    def __init__(
        self,
        backend: str = "auto",
        *,
        block_bytes: int = 1 << 20,
        read_depth: int = 8,
        write_depth: int = 8,
        num_drives: int = 1,
        keep_stats: bool = False,
    ) -> None:
        config = {
            "block_bytes": block_bytes,
            "read_depth": read_depth,
            "write_depth": write_depth,
            "num_drives": num_drives,
        }
        _check_config(backend, **config)
        native, error = open_queue(backend, **config, keep_stats=keep_stats)
        if error:
            raise OSError(
                error,
                f"aio backend '{backend}': expected it to work here, got {strerror(error)}. "
                "Use backend='auto', or ask aio.probe() what works",
            )
        self._native = native
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards that `_native` is open while C uses it
        self._dropped: list[tuple[Any, object]] = []  # transfers whose tickets are gone
        self._registered: list[object] = []  # memory: until the queue is closed
        self.backend = BACKEND_NAMES[lib.aio_queue_backend(native)]
        self.num_drives = num_drives
        self._finalizer = weakref.finalize(self, _close, native, self._pid, self._lock)
        _LIVE.add(self)
        if backend == "auto" and self.backend != "uring":
            tell_once(
                f"io_uring is not available (aio.probe() tells why): using {self.backend}, "
                "which costs more CPU time"
            )

    @property
    def native(self) -> Any:
        """The C queue (`aio_queue *`), for C code that submits by itself."""
        self.check_process()
        if not self._finalizer.alive:
            raise ValueError("aio.Queue: expected an open queue, got a closed one. Open another.")
        return self._native

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def check_process(self) -> None:
        """Raise in a child after fork."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"aio.Queue of process {self._pid}: expected to be used there, got process "
                f"{os.getpid()}, a child after fork, which does not have its thread. "
                "Open a queue in the child."
            )

    def register(self, buffer: Buffer | memoryview) -> bool:
        """Let the kernel pin `buffer` once instead of for every block.  Before the first transfer.

        False where that is not possible (not io_uring, or memory may not be locked): everything
        works without.  The queue keeps the memory until it is closed.
        """
        self.check_process()
        memory = memory_of(_unwrapped(buffer), writable=True)
        with self._lock:
            error = -lib.aio_register(self.native, memory.address, memory.num_bytes)
        if error == errno.EBUSY:
            raise RuntimeError(
                "aio.Queue.register: expected an idle queue, got transfers in flight. "
                "Register before the first one."
            )
        if error:
            tell_once(
                f"an I/O buffer of {memory.num_bytes} bytes could not be registered "
                f"({strerror(error)}): transfers cost more CPU time. Raise ulimit -l"
            )
            return False
        if self.backend != "uring":
            return False
        # Other memory at this address would be taken for it, and the kernel move these pages.
        self._registered.append(memory.keep)
        return True

    def read(self, file: File, buffer: object, offset: int, *, deadline: int = 0) -> Ticket:
        """Fill `buffer` from `offset`; the end of the file inside it is an error (ENODATA)."""
        return self.submit([Request("read", file, buffer, offset, deadline)])[0]

    def write(self, file: File, buffer: object, offset: int, *, deadline: int = 0) -> Ticket:
        """Write all of `buffer` at `offset`."""
        return self.submit([Request("write", file, buffer, offset, deadline)])[0]

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue all of them with one call, or none (ValueError, TypeError, MemoryError).

        The buffers must not be changed before the tickets have ended.
        """
        self.check_process()
        memories = [_memory(request) for request in requests]
        array = ffi.new("aio_request[]", len(requests))
        handles = ffi.new("aio_ticket *[]", len(requests))
        for native, request, memory in zip(array, requests, memories, strict=True):
            native.op = _OPS[request.operation]
            native.file = request.file.native
            native.buf = memory.address
            native.offset = request.offset
            native.bytes = memory.num_bytes
            native.deadline = request.deadline
        tickets = [
            Ticket(
                self,
                handles,
                index,
                operation=request.operation,
                file=request.file,
                offset=request.offset,
                num_bytes=memory.num_bytes,
                keep=memory.keep,
            )
            for index, (request, memory) in enumerate(zip(requests, memories, strict=True))
        ]
        with self._lock:
            error = -lib.aio_submit(self.native, array, len(requests), handles)
        if error:
            raise MemoryError(f"aio.Queue.submit of {len(requests)} transfers: {strerror(error)}")
        self._reap()
        return tickets

    def stats(self) -> Stats:
        """What was moved since the queue was opened; times and latencies only with `keep_stats`."""
        self.check_process()
        out = ffi.new("aio_stats *")
        with self._lock:
            lib.aio_queue_stats(self.native, out)
        return Stats(flow_of(out, lib.AIO_READ), flow_of(out, lib.AIO_WRITE))

    def retire(self, handle: Any, keep: object) -> None:
        """Take over a transfer whose ticket is dropped (Ticket calls it, in any thread)."""
        if os.getpid() != self._pid:
            return
        if lib.aio_wait(handle, 0, ffi.new("aio_result *")):
            self._dropped.append((handle, keep))
        else:
            lib.aio_release(handle)

    def close(self) -> None:
        """Cancel what is not submitted, wait for what is in flight.

        Tickets stay valid.  Twice is allowed.
        """
        if os.getpid() != self._pid:
            return
        self._finalizer()
        with self._lock:  # another thread's close() has ended too
            self._registered.clear()
        self._reap()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<aio.Queue {self.backend}{' closed' if self.closed else ''}>"

    def _reap(self) -> None:
        """Release dropped transfers that have ended.  An entry is popped by one caller only."""
        result = ffi.new("aio_result *")
        for _ in range(len(self._dropped)):
            try:
                handle, keep = self._dropped.pop(0)
            except IndexError:
                return
            if lib.aio_wait(handle, 0, result):
                self._dropped.append((handle, keep))
            else:
                lib.aio_release(handle)


_LIVE: weakref.WeakSet[Queue] = weakref.WeakSet()


def _close(native: Any, pid: int, lock: threading.Lock) -> None:
    """Also at exit, when other threads may still run: no call of theirs is in C then."""
    if os.getpid() == pid:
        with lock:
            lib.aio_queue_close(native)


def _forget_in_child() -> None:
    """A data loader's worker must not keep the ring, and the memory that it pins, alive."""
    for queue in list(_LIVE):
        if not queue.closed:
            queue._finalizer.detach()
            lib.aio_queue_forget(queue._native)


os.register_at_fork(after_in_child=_forget_in_child)


def _unwrapped(buffer: object) -> object:
    return buffer.view if isinstance(buffer, Buffer) else buffer


def _memory(request: Request) -> Any:
    if request.operation not in _OPS:
        raise ValueError(
            f"transfer on '{request.file.path}': expected operation 'read' or 'write', "
            f"got {request.operation!r}. Choose one of them."
        )
    memory = memory_of(_unwrapped(request.buffer), writable=request.operation == "read")
    check_range(request.file.path, request.offset, memory.num_bytes)
    return memory


def _check_config(
    backend: str, *, block_bytes: int, read_depth: int, write_depth: int, num_drives: int
) -> None:
    if backend not in BACKENDS:
        names = ", ".join(repr(name) for name in BACKENDS if name != "faults")
        raise ValueError(
            f"aio backend: expected one of {names}, got {backend!r}. Choose one of them."
        )
    if block_bytes <= 0 or block_bytes % BLOCK_MULTIPLE or block_bytes > 1 << 30:
        raise ValueError(
            f"block_bytes: expected a multiple of {BLOCK_MULTIPLE} up to 1 GiB, got {block_bytes}. "
            "1 MiB is good."
        )
    if not (1 <= read_depth <= 4096 and 1 <= write_depth <= 4096):
        raise ValueError(
            f"read_depth, write_depth: expected 1 to 4096 blocks, got {read_depth} and "
            f"{write_depth}. 8 is good."
        )
    if not 1 <= num_drives <= MAX_DRIVES:
        raise ValueError(
            f"num_drives: expected 1 to {MAX_DRIVES}, got {num_drives}. "
            "Give several paths the same drive."
        )
    if (read_depth + write_depth) * num_drives > MAX_BLOCKS_IN_FLIGHT:
        raise ValueError(
            f"(read_depth + write_depth) * num_drives: expected at most {MAX_BLOCKS_IN_FLIGHT} "
            f"blocks in flight, got {(read_depth + write_depth) * num_drives}. 8 is a good depth."
        )
