"""The host budget as one slab, cut into named regions and equal slots.

    slab  [ persistent | held gradients | fetch slots | update slots | spill slots ]

One allocation, made once: it sits on huge pages where they can be had, never grows, and is what
`host_memory` bounds. A slot is leased to one owner at a time and returned exactly once.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

import aio
from offload.errors import StateError
from offload.partition.unit import STORE_ALIGN_BYTES, round_up


class Slab:
    """A bump allocator over one `aio.Buffer`; regions live as long as the slab."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = round_up(max(num_bytes, STORE_ALIGN_BYTES), STORE_ALIGN_BYTES)
        self.buffer = aio.Buffer(self.num_bytes)
        self._used = 0

    def region(self, num_bytes: int) -> Region:
        """Take the next `num_bytes`, rounded up to 4096."""
        size = round_up(num_bytes, STORE_ALIGN_BYTES)
        if self._used + size > self.num_bytes:
            raise StateError(
                f"slab: expected {size:,} free bytes, got {self.num_bytes - self._used:,}."
            )
        start, self._used = self._used, self._used + size
        return Region(self, start, size)

    def close(self) -> None:
        self.buffer.close()


class Region:
    """A 4096-aligned piece of the slab."""

    def __init__(self, slab: Slab, start: int, num_bytes: int) -> None:
        self.slab = slab
        self.start = start
        self.num_bytes = num_bytes

    @property
    def address(self) -> int:
        return self.slab.buffer.address + self.start

    @property
    def view(self) -> memoryview:
        return memoryview(self.slab.buffer.view)[self.start : self.start + self.num_bytes]

    def part(self, start: int, num_bytes: int) -> Region:
        """Bytes [start, start + num_bytes) of this region."""
        return Region(self.slab, self.start + start, num_bytes)

    def tensor(self, dtype: torch.dtype, num_elems: int, *, offset: int = 0) -> torch.Tensor:
        """The region's memory as a (num_elems,) tensor, from byte `offset`; shares memory."""
        array = np.frombuffer(self.view, dtype=np.uint8)[
            offset : offset + num_elems * dtype.itemsize
        ]
        return torch.from_numpy(array).view(dtype)


class Slots:
    """Equal pieces of a region, each leased to one owner at a time.  Not thread-safe."""

    def __init__(self, region: Region, num_slots: int, slot_bytes: int) -> None:
        self.region = region
        self.slot_bytes = slot_bytes
        self.all = [region.part(index * slot_bytes, slot_bytes) for index in range(num_slots)]
        self._free = deque(self.all)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lease(self) -> Region | None:
        """A free slot, or None: the caller then finishes one of its own transfers first."""
        return self._free.popleft() if self._free else None

    def give_back(self, slot: Region) -> None:
        if slot in self._free:
            raise StateError("a slot was returned twice.")
        self._free.append(slot)
