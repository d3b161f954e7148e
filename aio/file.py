"""A file that transfers go through: a descriptor with O_DIRECT where that works, and one without.

The unaligned ends of a transfer use the second one, so callers need not align anything; aligned
transfers are the fast ones.
"""

from __future__ import annotations

import errno
import os
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
        self.path = os.fspath(path)
        self.mode = mode
        self._pid = os.getpid()
        buffered = os.open(self.path, _FLAGS[mode] | os.O_CLOEXEC, 0o600)
        direct_fd, self.alignment = _open_direct(self.path, mode) if direct else (-1, 512)
        if direct and direct_fd < 0:
            folder = os.path.dirname(os.path.abspath(self.path))
            tell_once(f"no direct I/O in '{folder}': transfers there go through the page cache")
        if direct_fd >= 0:  # read-ahead would only fill the cache beside the direct transfers
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
        self.native: Any = ffi.new("aio_file *", [direct_fd, buffered, self.alignment, 0, drive])
        if size is not None:
            self._reserve_or_remove(size)

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
        if os.getpid() == self._pid:
            lib.aio_file_close(self.native)
            return
        for name in (
            "direct_fd",
            "buffered_fd",
        ):  # a child: only its own copies, and its in_flight is a stale copy
            fd = getattr(self.native, name)
            setattr(self.native, name, -1)
            if fd >= 0:
                os.close(fd)

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

    def _reserve_or_remove(self, size: int) -> None:
        try:
            self.reserve(size)
        except OSError:
            self.close()
            if self.mode == "x+":
                os.unlink(self.path)
            raise


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
