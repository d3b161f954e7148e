"""Give free heap memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Return what the C library has free: a model that has just moved to the store leaves holes.

    Does nothing where the C library has no malloc_trim.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
