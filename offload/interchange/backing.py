"""Tensors over an unlinked file: ordinary to torch, and none of the process's own memory.

    tensor --views--> mapping of a segment (shared, 64 MiB or one large tensor) --> file, no name

The kernel writes their pages out and drops them whenever memory is short.  Space is reserved a
segment at a time; it is free again when the last tensor is gone, or the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from offload.errors import StoreError
from offload.partition.unit import round_up

SEGMENT_BYTES = 64 << 20
_ALIGN_BYTES = 4096  # each tensor's own pages, so that they are dropped with it


class BackingFile:
    """Hands out tensors in `folder`'s file system.  Closing it leaves the tensors alive."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise StoreError(
                f"path {folder}: expected a folder on a local drive, got none. Create it first."
            )
        self._folder = folder
        fd, name = tempfile.mkstemp(prefix="offload-backing-", dir=folder)
        os.unlink(name)
        self._fd = fd
        self._num_bytes = 0  # reserved
        self._segment: mmap.mmap | None = None
        self._used = 0  # of the segment

    @property
    def num_bytes(self) -> int:
        """Disk space reserved so far."""
        return self._num_bytes

    def empty(self, num_elems: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros; raises StoreError where the disk is full."""
        num_bytes = round_up(max(num_elems * dtype.itemsize, 1), _ALIGN_BYTES)
        if self._segment is None or self._used + num_bytes > len(self._segment):
            self._segment = self._grow(max(num_bytes, SEGMENT_BYTES))
            self._used = 0
        start, self._used = self._used, self._used + num_bytes
        return torch.frombuffer(self._segment, dtype=dtype, count=num_elems, offset=start)

    def _grow(self, num_bytes: int) -> mmap.mmap:
        try:
            os.posix_fallocate(self._fd, self._num_bytes, num_bytes)
        except OSError as error:
            free = os.fstatvfs(self._fd)
            raise StoreError(
                f"path {self._folder}: expected {num_bytes:,} more bytes for weights beside"
                f" {self._num_bytes:,}, got {free.f_bavail * free.f_frsize:,} free"
                f" ({error.strerror}). Free space or use another path."
            ) from error
        segment = mmap.mmap(self._fd, num_bytes, flags=mmap.MAP_SHARED, offset=self._num_bytes)
        self._num_bytes += num_bytes
        return segment

    def close(self) -> None:
        """Hand out no more; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._segment = None
