"""Formats of state, operation by operation in numpy: what the kernels must equal bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from offload.kernels import BLOCK_ELEMS

Array = npt.NDArray[Any]

TWO_BITS = 0x40000000
TOPS = {"int8": 127, "uint8": 255}
SPANS = {"int8": np.float32(122878.0), "uint8": np.float32(8053063680.0)}
RANDOM_STEP = 0xB896937D
LEAST = np.float32(2.0**-126)
_U64 = (1 << 64) - 1


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp32, rounded once: exact product in fp64, sum rounded to odd, then to fp32."""
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = np.asarray(product + addend)
    back = total - product
    rest = (product - (total - back)) + (addend - back)  # what the sum lost, exactly
    bits = total.view(np.int64)
    away = np.where((rest > 0) == (total > 0), 1, -1)
    odd = np.where((rest != 0) & (bits % 2 == 0), bits + away, bits)
    return odd.view(np.float64).astype(np.float32)


def _mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


def numbers(n: int, dtype: str, *, index: int, step: int, key: int, first: int) -> Array:
    """What elements first ... first + n of a tensor are rounded with."""
    bits = 16 if dtype == "bfloat16" else 20
    places = np.arange(first, first + n, dtype=np.uint64)
    found = np.empty(n, np.uint32)
    for block in range(first // BLOCK_ELEMS, (first + n - 1) // BLOCK_ELEMS + 1):
        seed = _mix64(_mix64(key) + block * 0x9E3779B97F4A7C15 & _U64)
        here = places // BLOCK_ELEMS == block
        place = (places[here] % BLOCK_ELEMS).astype(np.uint32)
        x = (place ^ place >> 16) * np.uint32(0x7FEB352D)
        x = (x ^ x >> 15) * np.uint32(0x846CA68B)
        fixed = (x ^ x >> 16) * np.uint32(256) + place
        turn = np.uint32((seed + step * RANDOM_STEP) & 0xFFFFFFFF)
        found[here] = fixed * np.uint32(seed >> 32 | 1) + turn
    return found >> (32 - bits) if index == 1 else found & np.uint32((1 << bits) - 1)


def decode(codes: Array, scale: Array | None) -> Array:
    """fp32 values of codes; `codes`: uint16 (bf16), int8, uint8 or fp32."""
    if codes.dtype == np.uint16:
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if codes.dtype == np.float32:
        return codes.copy()
    assert scale is not None
    by = np.repeat(scale, BLOCK_ELEMS)[: len(codes)]
    magnitude = np.abs(codes.astype(np.int32)).astype(np.uint32)
    line = (np.uint32(TWO_BITS) + (magnitude << 20)).view(np.float32)
    sign = np.where(codes < 0, np.float32(-1), np.float32(1))
    return fma(sign * line, by, sign * np.float32(-2) * by)


def encode(x: Array, name: str, random: Array) -> tuple[Array, Array | None]:
    """Codes and scales of finite fp32 values; `name`: "bfloat16", "int8", "uint8" or "float32"."""
    if name == "float32":
        return x.copy(), None
    if name == "bfloat16":
        return ((x.view(np.uint32) + random) >> 16).astype(np.uint16), None
    padded = np.zeros(-(-len(x) // BLOCK_ELEMS) * BLOCK_ELEMS, np.float32)
    padded[: len(x)] = np.abs(x)
    largest = padded.reshape(-1, BLOCK_ELEMS).max(axis=1)
    scale = np.where(largest > 0, np.maximum(largest / SPANS[name], LEAST), np.float32(0))
    with np.errstate(divide="ignore"):
        below_one = np.float32(1 - 2.0**-22)
        factor = np.where(largest > 0, below_one / scale, np.float32(0))
    line = fma(np.abs(x), np.repeat(factor, BLOCK_ELEMS)[: len(x)], np.float32(2))
    code = (line.view(np.uint32) + random - np.uint32(TWO_BITS)) >> 20
    assert len(code) == 0 or code.max() <= TOPS[name]  # so nothing needs to be cut off
    if name == "uint8":
        return np.maximum(code, 1).astype(np.uint8), scale
    return np.where(np.signbit(x), -code.astype(np.int32), code).astype(np.int8), scale
