"""What went wrong with a transfer, as its ticket raises it."""

from __future__ import annotations

import errno

from aio.native import strerror

_WHAT_TO_DO = {
    errno.ENODATA: "The file ends inside the range: check its size and the offset.",
    errno.ENOSPC: "Free space on that file system, or use a path with more.",
    errno.EDQUOT: "Free space below the quota, or use another path.",
    errno.EBADF: "The file was closed, or opened with mode 'r': writes need 'r+' or 'x+'.",
    errno.EIO: "The drive or the file system failed: look at the kernel's log first.",
    errno.ECANCELED: "It was cancelled, or its queue was closed, before all of it was submitted.",
    errno.EFAULT: "The buffer is no longer mapped: keep it alive until the ticket has ended.",
    errno.EINVAL: "The file system refuses this transfer: try the file with direct=False.",
    errno.EFBIG: "The file would grow beyond a limit of the file system or of ulimit -f.",
    errno.EROFS: "The file system is read-only: remount it or use another path.",
}


class IOFailed(OSError):
    """A transfer that did not do all of its bytes.

    `operation` ("read" or "write"), `path`, `offset` (where the first failed block started),
    `wanted` and `done` (bytes of the whole transfer), and `errno`; ENODATA: the file ended.
    """

    def __init__(
        self, number: int, operation: str, filename: str, *, offset: int, wanted: int, done: int
    ) -> None:
        super().__init__(number, strerror(number), filename)
        self.operation = operation
        self.path = filename
        self.offset = offset
        self.wanted = wanted
        self.done = done

    def __str__(self) -> str:
        advice = _WHAT_TO_DO.get(self.errno or 0, "Look at the kernel's log.")
        return (
            f"{self.operation} on '{self.path}' at byte {self.offset}: "
            f"expected {self.wanted} bytes, got {self.done} ({self.strerror}). {advice}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        numbers = {"offset": self.offset, "wanted": self.wanted, "done": self.done}
        return _rebuild, ((self.errno, self.operation, self.path), numbers)


def _rebuild(names: tuple[int, str, str], numbers: dict[str, int]) -> IOFailed:
    return IOFailed(
        *names, offset=numbers["offset"], wanted=numbers["wanted"], done=numbers["done"]
    )
