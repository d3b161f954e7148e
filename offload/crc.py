"""CRC-32 of memory, as zlib computes it, at the speed of memory (csrc/crc/crc.h).

crc32(b, crc32(a)) == crc32(a + b) == join(crc32(a), crc32(b), len(b))

| updated bytes ......... | tail: never updated ... |        one flat buffer
| block | block | block : | block | block |                  a sum for each MiB
                    `Tail` completes this one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from _offload_native import ffi, lib
from numpy.typing import NDArray

BLOCK_BYTES: int = lib.UPDATE_CHECKSUM_BYTES


def crc32(data: object, start: int = 0) -> int:
    """Return the crc of `data` (any contiguous buffer) behind what `start` is the crc of."""
    memory = ffi.from_buffer(data)
    return int(lib.crc_add(start, memory, len(memory)))


def join(first: int, second: int, num_bytes: int) -> int:
    """Return the crc of two pieces in a row from theirs; the second has `num_bytes` bytes."""
    return int(lib.crc_shift(first, num_bytes)) ^ second


@dataclass(frozen=True)
class Tail:
    """What lies behind the updated part of a flat buffer and stays: frozen tensors."""

    start: int  # byte in the flat buffer
    open_sum: int  # of the bytes that complete the block in which the updated part ends
    open_bytes: int
    sums: NDArray[np.uint64]  # of the blocks behind it

    @classmethod
    def of(cls, data: object, start: int) -> Self:
        """Take the bytes from byte `start` of the flat buffer to its end."""
        memory = ffi.from_buffer(data)
        open_bytes = min(-start % BLOCK_BYTES, len(memory))
        sums = [
            lib.crc_add(0, memory + at, min(BLOCK_BYTES, len(memory) - at))
            for at in range(open_bytes, len(memory), BLOCK_BYTES)
        ]
        return cls(
            start, int(lib.crc_add(0, memory, open_bytes)), open_bytes, np.array(sums, np.uint64)
        )

    def complete(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the sums of the whole flat buffer from those of the updated part."""
        assert len(sums) == -(-self.start // BLOCK_BYTES)
        whole = np.concatenate([sums, self.sums])
        if self.open_bytes:
            last = len(sums) - 1
            whole[last] = join(int(sums[last]), self.open_sum, self.open_bytes)
        return whole
