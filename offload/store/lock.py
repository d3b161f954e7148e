"""One store, one owner: a lock that dies with its process.

The lock is `flock` on the file LOCK, never the file's existence: a killed job leaves the file
behind and the lock free.  The file's text (process and boot) serves messages only.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

from offload.errors import StoreError

LOCK_NAME = "LOCK"
_MAX_TRIES = 1000  # against somebody who looks, or removes the folder, at the same instant


def boot_id() -> str:
    """Name this boot of the machine; another one means that unflushed data may be lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class FolderLock:
    """The exclusive right to a store's folder, from construction until `release`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._fd = self._acquire()
        text = json.dumps({"pid": os.getpid(), "boot_id": boot_id()}) + "\n"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)
        # A forked worker shares the lock and would keep it after the trainer was killed.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_copy(this))

    def _acquire(self) -> int:
        for _ in range(_MAX_TRIES):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever removes a store unlinks LOCK last: then this descriptor locks nothing.
                if os.fstat(fd).st_ino == os.stat(self._path).st_ino:
                    return fd
            except BlockingIOError:
                if _is_owned(fd):
                    os.close(fd)
                    raise in_use(self._path.parent) from None
            except FileNotFoundError:
                pass
            os.close(fd)
        raise in_use(self._path.parent)

    def release(self) -> None:
        """Let others have the folder.  May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def release(locks: Iterable[FolderLock]) -> None:
    for lock in locks:
        lock.release()


def holder(folder: Path) -> int | None:
    """Return the process that holds the folder (0: unknown), or None when it is free."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return int(json.loads(os.pread(fd, 4096, 0))["pid"]) if _is_owned(fd) else None
    except (ValueError, KeyError, TypeError):
        return 0
    finally:
        os.close(fd)


def _is_owned(fd: int) -> bool:
    """Tell an owner from somebody who, like this function, only looks for an instant."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def in_use(folder: Path) -> StoreError:
    """The error for a folder that somebody holds."""
    pid = holder(folder)
    who = f"process {pid}" if pid else "another process"
    if pid == os.getpid():
        who = f"this process ({pid}), through another engine"
    return StoreError(
        f"store {folder} is in use by {who}. "
        "Wait for it to end, or give this job another name or path."
    )


def _close_copy(ref: weakref.ref[FolderLock]) -> None:
    lock = ref()
    if lock is not None:
        lock.release()
