"""The boundary to C: what crosses it is checked and cast here, and nowhere else in this package.

    any contiguous buffer --(address, num_bytes, keep)--> aio_request

`keep` is what holds the memory in place while C uses it: a cffi view pins the exporter, so that a
bytearray cannot be resized and a mapping cannot be closed under a transfer.
"""

from __future__ import annotations

import errno
import os
from typing import Any, NamedTuple

from _offload_native import ffi, lib

BACKENDS = {
    "auto": lib.AIO_AUTO,
    "uring": lib.AIO_URING,
    "libaio": lib.AIO_LIBAIO,
    "threads": lib.AIO_THREADS,
    "faults": lib.AIO_FAULTS,
}
BACKEND_NAMES = {number: name for name, number in BACKENDS.items()}
REAL_BACKENDS = ("uring", "libaio", "threads")  # in the order in which "auto" tries them
BLOCK_MULTIPLE = 4096
MAX_BLOCKS_IN_FLIGHT = 8192
MAX_FILE_BYTES = 2**63 - 1

__all__ = ["Memory", "check_range", "ffi", "lib", "memory_of", "open_queue", "strerror"]


class Memory(NamedTuple):
    """Bytes that C may touch, and the object that keeps them there."""

    address: Any  # cffi void*
    num_bytes: int
    keep: object


def memory_of(buffer: object, *, writable: bool) -> Memory:
    """Check that `buffer` is contiguous (and writable) and tell where it lies.

    Accepts whatever has the buffer protocol, and `(address, num_bytes)`: the caller then answers
    for the memory.  Raises TypeError or ValueError.
    """
    if isinstance(buffer, tuple):
        return _memory_at(buffer)
    try:
        view = ffi.from_buffer("char[]", buffer, require_writable=writable)
    except (TypeError, BufferError, ValueError) as error:
        need = "a writable, C-contiguous buffer" if writable else "a C-contiguous buffer"
        raise TypeError(
            f"transfer of a {type(buffer).__name__}: expected {need} or (address, num_bytes), "
            f"got: {error}. "
            "Pass a slice of an aio.Buffer, a numpy array or a bytearray."
        ) from None
    keep = _pin(buffer.obj) if isinstance(buffer, memoryview) else None
    return Memory(ffi.cast("void *", view), len(view), keep or view)


def _pin(exporter: object) -> object | None:
    """Hold the memory at its source: Python 3.11 crashes if the garbage collector finds a cycle
    with a memoryview that is exported itself."""
    try:
        return ffi.from_buffer("char[]", exporter)  # type: ignore[no-any-return]
    except (TypeError, BufferError, ValueError):  # not contiguous as a whole
        return None


def _memory_at(pair: tuple[Any, ...]) -> Memory:
    if len(pair) != 2 or not all(isinstance(part, int) for part in pair):
        raise TypeError(
            f"transfer of a tuple: expected (address, num_bytes), two integers, got {pair!r}. "
            "Take both from an aio.Buffer."
        )
    address, num_bytes = pair
    if address <= 0 or num_bytes < 0:
        raise ValueError(
            "transfer of (address, num_bytes): expected an address > 0 and a size >= 0, "
            f"got {pair!r}. "
            "Take both from an aio.Buffer."
        )
    return Memory(ffi.cast("void *", address), num_bytes, None)


def check_range(path: str, offset: int, num_bytes: int) -> None:
    """Refuse what no file can hold before it becomes another number in C."""
    if offset < 0 or offset + num_bytes > MAX_FILE_BYTES:
        raise ValueError(
            f"transfer on '{path}': expected 0 <= offset and offset + size < 2^63, "
            f"got offset {offset} and {num_bytes} bytes. Check the offset."
        )


def open_queue(backend: str, **config: int) -> tuple[Any, int]:
    """(queue, 0), or (NULL, errno)."""
    out = ffi.new("aio_queue **")
    settings = ffi.new("aio_config *", {"backend": BACKENDS[backend], "num_drives": 1, **config})
    error = -int(lib.aio_queue_open(settings, out))
    return out[0], error


def strerror(number: int) -> str:
    """`ENOSPC: No space left on device`."""
    return f"{errno.errorcode.get(number, str(number))}: {os.strerror(number)}"
