"""The memory that updates are timed on; knows only torch, so that peers can load this file alone.

Every stream starts on a huge page of its own plus `stagger` bytes times its number, so that one
number says how the streams lie relative to each other.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
PAUSE_S = 0.03  # idle OpenMP threads spin after a job; let them fall asleep
Job = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One call: elapsed seconds, and CPU seconds of the process."""

    seconds: float
    cpu_s: float

    @classmethod
    def of(cls, job: Job) -> Timing:
        cpu, start = time.process_time(), time.perf_counter()
        job()
        return cls(time.perf_counter() - start, time.process_time() - cpu)


class Streams:
    """fp32 weight, moments and gradient, the 16-bit gradient and weight, the master's low half."""

    def __init__(self, num_elems: int, stagger: int) -> None:
        self.num_elems = num_elems
        self._stagger = stagger
        self._maps: list[mmap.mmap] = []
        self.weight = self._stream(torch.float32)
        self.exp_avg = self._stream(torch.float32)
        self.exp_avg_sq = self._stream(torch.float32)
        self.grad = self._stream(torch.float32)
        self.grad16 = self._stream(torch.bfloat16)
        self.weight16 = self._stream(torch.bfloat16)
        self.low = self._stream(torch.int16)
        self.states = {
            "bf16": [self._stream(torch.bfloat16) for _ in range(2)],
            "int8": [self._stream(torch.int8), self._stream(torch.uint8)],
        }
        self.scales = [torch.empty(-(-num_elems // 256)) for _ in range(2)]  # of int8

    def _stream(self, dtype: torch.dtype) -> Tensor:
        offset = self._stagger * len(self._maps)
        num_bytes = self.num_elems * dtype.itemsize
        memory = mmap.mmap(-1, num_bytes + offset + HUGE_PAGE, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(memory)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE + offset
        return torch.frombuffer(memory, dtype=dtype, count=self.num_elems, offset=start)

    def reset(self) -> None:
        """Give every stream the values of an ordinary training step."""
        torch.manual_seed(0)
        block = torch.randn(1 << 20)
        for stream, scale in ((self.weight, 0.05), (self.grad, 1e-2)):
            for piece in stream.split(len(block)):
                piece.copy_(block[: len(piece)] * scale)
        self.grad16.copy_(self.grad)
        self.weight16.copy_(self.weight)
        self.low.zero_()
        self.exp_avg.fill_(1e-3)
        self.exp_avg_sq.fill_(1e-4)
        self.states["bf16"][0].fill_(1e-3)
        self.states["bf16"][1].fill_(1e-4)
        for state, by, size in zip(self.states["int8"], self.scales, (1e-3, 1e-4), strict=True):
            state.fill_(64)  # stands for 1022 times the scale: see csrc/simd/template_states.h
            by.fill_(size / 1022)
