"""The calls through which a store's own bytes reach the disk.

All of them are here, so that a test can record them, replay any prefix and lose what was not
flushed.  Bulk data goes through `aio` instead.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import aio

_COPY_BYTES = 1 << 20


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


def reserve(fd: int, num_bytes: int) -> None:
    """Give the file its blocks now, so that no later write can meet a full disk."""
    if num_bytes > 0:
        os.posix_fallocate(fd, 0, num_bytes)


def flush(fd: int) -> None:
    """Wait until what was written through any descriptor of this file survives a power loss."""
    os.fdatasync(fd)


def flush_file(file: aio.File) -> None:
    file.sync()


def flush_folder(folder: Path) -> None:
    """Make names created or renamed in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, data: bytes) -> None:
    """Put a small file in place, old or new but never half, and durable."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_at(fd, data, 0)
        flush(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    flush_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Give a file another name; what had that name loses it.  Durable after `flush_folder`."""
    os.rename(source, target)


def copy(source: Path, target: Path, start: int, stop: int) -> None:
    """Copy the bytes [start, stop) of one file to the same place in another."""
    read_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    write_fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while start < stop:
            data = os.pread(read_fd, min(_COPY_BYTES, stop - start), start)
            if not data:
                raise OSError(errno.ENODATA, "the file ends too early", str(source))
            write_at(write_fd, data, start)
            start += len(data)
    finally:
        os.close(read_fd)
        os.close(write_fd)


def explain(error: OSError, what: str) -> str:
    """One line for an operating system's error: what failed, why, and what to do."""
    space = "Free space there, or use another path."
    writable = "Make it writable for this user, or use another path."
    advice = {
        errno.ENOSPC: space,
        errno.EDQUOT: space,
        errno.EACCES: writable,
        errno.EPERM: writable,
        errno.EROFS: "Mount it read-write, or use another path.",
    }
    why = os.strerror(error.errno) if error.errno else str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"{what}: {why}{where}. {advice.get(error.errno or 0, 'Check the drive and its mount.')}"
