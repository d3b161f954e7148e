"""A file that transfers go through: a descriptor with O_DIRECT where that works, and one without.

The unaligned ends of a transfer use the second one, so callers need not align anything; aligned
transfers are the fast ones.
"""

from __future__ import annotations

import errno
import os
import weakref
from typing import Any, Literal

from aio.log import tell_once
from aio.native import ffi, lib

Mode = Literal["r", "r+", "x+"]
_FLAGS = {"r": os.O_RDONLY, "r+": os.O_RDWR, "x+": os.O_RDWR | os.O_CREAT | os.O_EXCL}
FALLBACK_ALIGNMENT = 4096


class File:
    """Open `path` ("r": read, "r+": read and write, "x+": create).

    `size`: bytes to reserve.  `direct=False` goes through the page cache.  `drive`: whose shares of
    a queue its transfers use (modulo the queue's `num_drives`).  Raises OSError; a new file that
    could not be reserved is removed again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Mode = "r",
        *,
        direct: bool = True,
        size: int | None = None,
        drive: int = 0,
    ) -> None:
        if mode not in _FLAGS:
            raise ValueError(
                f"mode of '{os.fspath(path)}': expected 'r', 'r+' or 'x+', got {mode!r}. "
                "Choose one of them."
            )
        if not 0 <= drive < 2**32 or (size or 0) < 0:
            raise ValueError(
                f"'{os.fspath(path)}': expected drive and size from 0, got {drive} and {size}. "
                "Number the drives from 0, give the size in bytes."
            )
        self.path = os.fspath(path)
        self.mode = mode
        self.alignment = 512  # bytes
        self.native: Any = ffi.new("aio_file *", [-1, -1, self.alignment, 0, drive])
        self.native.buffered_fd = os.open(self.path, _FLAGS[mode] | os.O_CLOEXEC, 0o600)
        _LIVE.add(self)
        try:
            if direct:
                self._add_direct()
            self.reserve(size or 0)
        except BaseException:
            self.close()
            if mode == "x+":
                os.unlink(self.path)
            raise

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is used."""
        return bool(self.native.direct_fd >= 0)

    @property
    def closed(self) -> bool:
        return bool(self.native.buffered_fd < 0)

    @property
    def size(self) -> int:
        """Bytes, now."""
        return os.fstat(self.fileno()).st_size

    def fileno(self) -> int:
        """The descriptor without O_DIRECT."""
        if self.closed:
            raise ValueError(
                f"'{self.path}': expected an open file, got a closed one. Open it again."
            )
        return int(self.native.buffered_fd)

    def reserve(self, num_bytes: int) -> None:
        """Allocate the first `num_bytes` on the disk: no later write runs out of space."""
        if num_bytes <= 0:
            return
        try:
            os.posix_fallocate(self.fileno(), 0, num_bytes)
        except OSError as error:
            free = os.fstatvfs(self.fileno())
            raise OSError(
                error.errno,
                f"reserving space: expected {num_bytes} bytes, got "
                f"{errno.errorcode.get(error.errno or 0)} with "
                f"{free.f_bavail * free.f_frsize} bytes free. "
                "Free space or use another path",
                self.path,
            ) from error

    def sync(self) -> None:
        """fdatasync: what was written (and the size) survives a power loss.  Blocks."""
        os.fdatasync(self.fileno())

    def close(self) -> None:
        """Close both descriptors, after the blocks in flight; what is not yet submitted fails.

        Twice is allowed.
        """
        lib.aio_file_close(self.native)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "native", None) is not None:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "direct" if self.direct else "buffered"
        return f"<aio.File {self.path!r} {self.mode} {state}>"

    def _add_direct(self) -> None:
        self.native.direct_fd, self.alignment = _open_direct(self.path, self.mode)
        self.native.alignment = self.alignment
        if self.direct:  # read-ahead would only fill the cache beside the direct transfers
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            return
        folder = os.path.dirname(os.path.abspath(self.path))
        tell_once(f"no direct I/O in '{folder}': transfers there go through the page cache")


_LIVE: weakref.WeakSet[File] = weakref.WeakSet()


def _start_anew_in_child() -> None:
    """The blocks in flight are the parent's: close() must not wait for them here."""
    for file in list(_LIVE):
        file.native.in_flight = 0


os.register_at_fork(after_in_child=_start_anew_in_child)


def _open_direct(path: str, mode: Mode) -> tuple[int, int]:
    """(descriptor or -1, alignment in bytes)."""
    flags = _FLAGS[mode] & ~(os.O_CREAT | os.O_EXCL)
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):  # tmpfs, some overlays
            return -1, FALLBACK_ALIGNMENT
        raise
    alignment = ffi.new("uint32_t *")
    if lib.aio_direct_alignment(fd, alignment):
        os.close(fd)
        return -1, FALLBACK_ALIGNMENT
    return fd, int(alignment[0])
