"""Inputs for kernels: any bits at any alignment; updates whose results compare as bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from offload import kernels

Array = npt.NDArray[Any]

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BORDERS = (16, 32, 1024, 4096, 65536)
SIZES = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 31, 97, 331, 1009, 4099]),
    st.builds(lambda border, by: border + by, st.sampled_from(BORDERS), st.integers(-2, 2)),
    st.integers(0, 300),
)
OFFSETS = st.tuples(*[st.integers(0, 70)] * 5)  # bytes: element alignment is not assumed either


def placed(values: Array, offset: int) -> Array:
    """A copy of `values` that starts `offset` bytes after a multiple of 64."""
    memory = np.zeros(values.nbytes + 192, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    view = memory[start : start + values.nbytes].view(np.uint8)
    at = np.ndarray(values.shape, values.dtype, buffer=view.data)
    at[...] = values
    return at


def bits_f32(rng: np.random.Generator, n: int) -> Array:
    """Any bit patterns: every exponent, denormals, Inf and NaN included."""
    return rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


def to_format(values: Array, name: str) -> torch.Tensor:
    return torch.from_numpy(np.array(values)).to(TORCH[name])


@dataclass(frozen=True)
class State:
    """The streams of one update."""

    hi: Array
    lo: Array
    exp_avg: Array
    exp_avg_sq: Array
    grad: Array | torch.Tensor

    def copy(self, offsets: tuple[int, ...] = (0, 0, 0, 0, 0)) -> State:
        names = ("hi", "lo", "exp_avg", "exp_avg_sq")
        moved = replace(
            self, **{n: placed(getattr(self, n), o) for n, o in zip(names, offsets, strict=False)}
        )
        if isinstance(self.grad, np.ndarray):
            moved = replace(moved, grad=placed(self.grad, offsets[4]))
        return moved

    def update(self, row: np.void, threads: kernels.Threads | None = None) -> bool:
        return kernels.adam_split(
            self.hi, self.lo, self.exp_avg, self.exp_avg_sq, self.grad, row=row, threads=threads
        )

    def data(self) -> tuple[bytes, ...]:
        return tuple(x.tobytes() for x in (self.hi, self.lo, self.exp_avg, self.exp_avg_sq))

    def master(self) -> Array:
        joined = np.empty(self.hi.shape, np.float32)
        kernels.join(self.hi, self.lo, joined)
        return joined


def state_of(master: Array, exp_avg: Array, exp_avg_sq: Array, grad: Array | torch.Tensor) -> State:
    hi, lo = np.empty(master.shape, np.uint16), np.empty(master.shape, np.int16)
    kernels.split(np.ascontiguousarray(master, np.float32), hi, lo)
    return State(hi, lo, exp_avg.astype(np.float32), exp_avg_sq.astype(np.float32), grad)


def wild_state(seed: int, n: int, grad_name: str) -> State:
    """Any bits in every stream."""
    rng = np.random.default_rng(seed)
    grad = bits_f32(rng, n) if grad_name == "float32" else to_format(bits_f32(rng, n), grad_name)
    return state_of(bits_f32(rng, n), bits_f32(rng, n), bits_f32(rng, n), grad)


def tame_state(seed: int, n: int, grad_name: str) -> State:
    """Magnitudes over many binades, denormals included; no overflow in the formula."""
    rng = np.random.default_rng(seed)

    def spread(low: float, high: float) -> Array:
        sign = rng.choice([-1.0, 1.0], n)
        return (sign * 10.0 ** rng.uniform(low, high, n)).astype(np.float32)

    grad = spread(-44, 15) if grad_name == "float32" else to_format(spread(-9, 4), grad_name)
    return state_of(spread(-42, 10), spread(-42, 10), np.abs(spread(-44, 30)), grad)
