"""A file written from its start to its end, at the drive's rate.

    write(bytes) --copy--> piece of 4 MiB --full: direct write--> <name>.partial --commit--> <name>

Three pieces take turns.  Space is reserved first; the name appears when everything is on the drive.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

import aio
from offload.errors import StoreError

PIECE_BYTES = 4 << 20
_NUM_PIECES = 3
_PARTIAL = ".partial"


class FileStream:
    """A file that is there under its name when it is whole and flushed, and not before.

    Leaving by an exception removes what was written.  Raises StoreError where the disk is full.
    """

    def __init__(self, path: Path, num_bytes: int, queue: aio.Queue) -> None:
        self.path = path
        self._partial = path.with_name(path.name + _PARTIAL)
        self._num_bytes = num_bytes
        self._queue = queue
        self._file = _reserve(path, self._partial, num_bytes)
        self._buffer = aio.Buffer(_NUM_PIECES * PIECE_BYTES)
        self._free = deque(
            self._buffer.view[i * PIECE_BYTES :][:PIECE_BYTES] for i in range(_NUM_PIECES)
        )
        self._flying: deque[tuple[memoryview, aio.Ticket]] = deque()
        self._filled = self._offset = 0  # of the piece in turn; where it goes

    def write(self, data: bytes | memoryview) -> None:
        """Append; waits where the drive is slower than the caller."""
        view = memoryview(data)
        while view:
            count = min(len(view), PIECE_BYTES - self._filled)
            self._free[0][self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == PIECE_BYTES:
                self._submit()

    def commit(self) -> None:
        """Flush and give it its name."""
        if self._filled:
            self._submit()
        while self._flying:
            self._retire()
        assert self._offset == self._num_bytes, (self.path, self._offset, self._num_bytes)
        self._file.sync()
        self._close()
        os.replace(self._partial, self.path)

    def discard(self) -> None:
        while self._flying:
            with contextlib.suppress(aio.IOFailed):
                self._retire()
        self._close()
        self._partial.unlink(missing_ok=True)

    def _submit(self) -> None:
        piece = self._free.popleft()
        ticket = self._queue.write(self._file, piece[: self._filled], self._offset)
        self._flying.append((piece, ticket))
        self._offset += self._filled
        self._filled = 0
        if not self._free:
            self._retire()

    def _retire(self) -> None:
        piece, ticket = self._flying.popleft()
        self._free.append(piece)
        ticket.wait()

    def _close(self) -> None:
        self._file.close()
        self._free.clear()
        self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if kind is not None:
            self.discard()
            return
        try:
            self.commit()
        except BaseException:
            self.discard()
            raise


def _reserve(path: Path, partial: Path, num_bytes: int) -> aio.File:
    """A new file with the rights of any other; its blocks are its own."""
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
    file = aio.File(partial, "r+")
    try:
        file.reserve(num_bytes)
    except OSError as error:
        free = os.fstatvfs(file.fileno())
        file.close()
        partial.unlink()
        raise StoreError(
            f"{path}: expected {num_bytes:,} free bytes, got"
            f" {free.f_bavail * free.f_frsize:,} ({os.strerror(error.errno or 0)})."
            " Free space or use another path."
        ) from error
    return file


def write_small(path: Path, text: str, queue: aio.Queue) -> None:
    """A file of text, whole or not there."""
    data = text.encode()
    with FileStream(path, len(data), queue) as file:
        file.write(data)


def remove_partial(folder: Path) -> None:
    """Remove what a writer that died has left."""
    for path in folder.glob(f"*{_PARTIAL}"):
        path.unlink()
