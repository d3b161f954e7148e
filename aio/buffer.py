"""Memory for I/O: huge pages where they can be had, not inherited by child processes.

    Buffer --view--> memoryview --slices, numpy.frombuffer--> ...

The memory goes back when the buffer is closed (or collected) and the last slice of it is gone: a
slice in a transfer or in an array never points to nothing.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any, Literal

from aio.native import ffi, lib, strerror

Pages = Literal["hugetlb", "transparent", "none"]


class Buffer:
    """`num_bytes` of zeroed memory on a 2 MiB boundary, advised to be huge, touched."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise ValueError(
                f"aio.Buffer: expected a size > 0 bytes, got {num_bytes}. Pass the size in bytes."
            )
        base, hugetlb = ffi.new("void **"), ffi.new("int *")
        error = lib.aio_map(num_bytes, base, hugetlb)
        if error:
            raise MemoryError(
                f"aio.Buffer: expected {num_bytes} bytes of memory, got {strerror(-error)}. "
                "Ask for less or raise the limit (ulimit -d, cgroup)."
            )
        # The views hold this pointer; its destructor runs when the last of them is gone.
        pointer = ffi.gc(ffi.cast("char *", base[0]), _unmapper(num_bytes), num_bytes)
        self._view: memoryview | None = memoryview(ffi.buffer(pointer, num_bytes))
        self._pid = os.getpid()
        self._hugetlb = bool(hugetlb[0])
        self.address = int(ffi.cast("uintptr_t", pointer))
        self.num_bytes = num_bytes

    @property
    def view(self) -> memoryview:
        """All of it, writable; slices keep the memory alive."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "aio.Buffer: expected the process that made it, got a child after fork, which does "
                "not have the memory. Make a buffer in the child."
            )
        if self._view is None:
            raise ValueError("aio.Buffer: expected an open buffer, got a closed one. Make another.")
        return self._view

    @cached_property
    def huge(self) -> Pages:
        """What was really got, by the kernel's account; "transparent" if most of it is."""
        if self._hugetlb:
            return "hugetlb"
        size, huge = _mapping_kib(self.address)
        return "transparent" if huge * 2 >= size > 0 else "none"

    def __len__(self) -> int:
        return self.num_bytes

    def close(self) -> None:
        """Give the memory back, as soon as no slice of it is left.  Twice is allowed."""
        self._view = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _unmapper(num_bytes: int) -> Any:
    owner, unmap, getpid = os.getpid(), lib.aio_unmap, os.getpid

    def unmap_in_owner(base: Any) -> None:
        if getpid() == owner:  # a child never had the mapping, and may have another one there
            unmap(base, num_bytes)

    return unmap_in_owner


def _mapping_kib(address: int) -> tuple[int, int]:
    """(size, anonymous huge pages) in KiB of the mapping at `address`; (0, 0): not told."""
    size = huge = 0
    inside = False
    try:
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                word = line.split(None, 1)[0]
                if not word.endswith(":"):
                    start, _, stop = word.partition("-")
                    inside = int(start, 16) <= address < int(stop, 16)
                elif inside and word == "Size:":
                    size = int(line.split()[1])
                elif inside and word == "AnonHugePages:":
                    huge = int(line.split()[1])
    except OSError:
        return 0, 0
    return size, huge
