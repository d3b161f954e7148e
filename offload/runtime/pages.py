"""A hint to the kernel: which pages will be read soon."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch


def will_need(tensor: torch.Tensor, start: int, num_elems: int) -> None:
    """Begin to read elements [start, start + num_elems) of a contiguous tensor; never waits.

    Matters where it is a view of a file: page faults alone read small windows one after another,
    at a fraction of the drive's rate.  Does nothing for memory that is there or not the host's.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not num_elems:
        return
    first = tensor.data_ptr() + start * tensor.itemsize
    stop = first + num_elems * tensor.itemsize
    page = first // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise()(page, stop - page, mmap.MADV_WILLNEED)  # a hint: what it returns changes nothing


@cache
def _madvise() -> Any:
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
