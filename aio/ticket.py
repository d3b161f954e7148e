"""The handle of one transfer.

    submitted -> ended (all bytes, or an error that wait() raises)

A ticket keeps its file and its memory alive.  Dropping one before its end is allowed: it then
leaves them to the queue.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aio.errors import IOFailed
from aio.native import ffi, lib

if TYPE_CHECKING:
    from aio.file import File
    from aio.queue import Queue

WAIT_SLICE_S = 0.25  # how long a wait may keep Python from handling Ctrl-C


class Ticket:
    """Made by Queue; any thread may call anything.

    It is made before the transfer, which appears in `handles[index]` (NULL until then): whatever
    interrupts Python behind the submission finds the memory in a ticket's hands.
    """

    __slots__ = (
        *("_handles", "_index", "_keep", "_queue"),
        *("file", "num_bytes", "offset", "operation"),
    )

    def __init__(
        self,
        queue: Queue,
        handles: Any,  # aio_ticket *[]
        index: int,
        *,
        operation: str,
        file: File,
        offset: int,
        num_bytes: int,
        keep: object,
    ) -> None:
        self._queue = queue
        self._handles = handles
        self._index = index
        self._keep = keep
        self.operation = operation
        self.file = file
        self.offset = offset
        self.num_bytes = num_bytes

    def wait(self, timeout: float | None = None) -> None:
        """Block (without the GIL) until the transfer has ended.

        Raises IOFailed if it failed, every time; TimeoutError after `timeout` seconds.
        """
        self._queue.check_process()
        result = ffi.new("aio_result *")
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SLICE_S if until is None else min(WAIT_SLICE_S, until - time.monotonic())
            if not lib.aio_wait(self._handles[self._index], max(0, int(left * 1e9)), result):
                break
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(
                    f"{self.operation} on '{self.file.path}' at byte {self.offset}: "
                    f"expected an end within {timeout} s, got none. Wait again, or cancel it."
                )
        self._raise_if_failed(result)

    def done(self) -> bool:
        """Whether it has ended, with or without an error.  Does not block."""
        self._queue.check_process()
        return not lib.aio_wait(self._handles[self._index], 0, ffi.new("aio_result *"))

    def cancel(self) -> bool:
        """Drop what is not yet submitted; the ticket then ends with ECANCELED.

        False: nothing was left to drop.
        """
        self._queue.check_process()
        return not lib.aio_cancel(self._handles[self._index])

    def _raise_if_failed(self, result: Any) -> None:
        if result.error:
            raise IOFailed(
                result.error,
                self.operation,
                self.file.path,
                offset=result.offset,
                wanted=self.num_bytes,
                done=result.bytes_done,
            )

    def __del__(self) -> None:
        if self._handles[self._index]:
            self._queue.retire(self._handles[self._index], (self.file, self._keep))

    def __repr__(self) -> str:
        return (
            f"<aio.Ticket {self.operation} {self.file.path!r} [{self.offset}, +{self.num_bytes})>"
        )
