"""For tests: make a queue's drive fail, stumble or stand still.

    queue = aio.Queue("faults", ...)         # one block after the other, in the order of submission
    faults = aio.faults.Faults(queue)
    faults.inject(Fault.error(3, errno.EIO), Fault.short(5, num_bytes=100))

Block n is the n-th that the queue hands to the drive, from 0; a retry counts again.  Nothing
depends on time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aio.native import ffi, lib, strerror
from aio.queue import Queue

EVERYTHING = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one block: use the constructors below."""

    nth: int
    kind: int
    value: int

    @staticmethod
    def error(nth: int, number: int) -> Fault:
        """Nothing is done, the drive says `number` (errno)."""
        return Fault(nth, lib.AIO_FAULT_ERROR, number)

    @staticmethod
    def short(nth: int, num_bytes: int) -> Fault:
        """Only the first `num_bytes` are done."""
        return Fault(nth, lib.AIO_FAULT_SHORT, num_bytes)

    @staticmethod
    def delay(nth: int, num_blocks: int) -> Fault:
        """`num_blocks` younger blocks end first, as far as there are any."""
        return Fault(nth, lib.AIO_FAULT_DELAY, num_blocks)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A block as it was handed to the drive."""

    operation: Literal["read", "write"]
    offset: int
    num_bytes: int


class Faults:
    """The controls of a "faults" queue, until it is closed; close() waits for what is held."""

    def __init__(self, queue: Queue) -> None:
        if queue.backend != "faults":
            raise ValueError(
                f"aio.faults: expected a queue with backend 'faults', got '{queue.backend}'. "
                "Open one for the test."
            )
        self._native = queue.native

    def inject(self, *faults: Fault) -> None:
        """Replace what was injected before."""
        rows = [{"nth": fault.nth, "kind": fault.kind, "value": fault.value} for fault in faults]
        _check(lib.aio_faults_inject(self._native, ffi.new("aio_fault[]", rows), len(rows)))

    def allow(self, num_blocks: int = EVERYTHING) -> None:
        """Let `num_blocks` more end, then hold; 0 holds all, at once."""
        _check(lib.aio_faults_allow(self._native, num_blocks))

    def skip_io(self) -> None:
        """From now on succeed without touching file or memory."""
        _check(lib.aio_faults_skip_io(self._native, 1))

    def wait_submitted(self, num_blocks: int) -> None:
        """Block until the queue has submitted so many blocks over its life."""
        _check(lib.aio_faults_wait(self._native, num_blocks))

    def log(self) -> list[Submitted]:
        """All blocks that were submitted, in order."""
        room = lib.aio_faults_log(self._native, ffi.NULL, 0)
        rows = ffi.new("aio_fault_block[]", room)
        lib.aio_faults_log(self._native, rows, room)
        return [
            Submitted("write" if row.op == lib.AIO_WRITE else "read", row.offset, row.bytes)
            for row in rows
        ]


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"aio.faults: {strerror(-result)}")
