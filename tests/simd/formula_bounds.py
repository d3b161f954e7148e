"""The published formulas in float64, with the roundings' bound.

The bound follows the formula: each operation adds half a unit in the last place of its result
(u = 2^-24) or, where that is below the normal numbers, half of the least denormal, and passes on
what its arguments have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from _offload_native import lib
from numpy.typing import NDArray

from offload import kernels

U = 2.0**-24
LEAST = 2.0**-149
TINY = 2.0**-140  # what underflow adds
F64 = NDArray[np.float64]


@dataclass
class Result:
    """float64 results and how far fp32 may be from them."""

    w: F64
    w_error: F64
    states: tuple[F64, ...] = ()
    state_errors: tuple[F64, ...] = ()


def scaled(row: dict[str, float], w: F64, g: F64) -> tuple[F64, F64]:
    """l2 * w + grad_scale * g, and its error."""
    product = row["grad_scale"] * g
    total = row["l2"] * w + product
    return total, U * (np.abs(product) + np.abs(total)) + 2 * LEAST


def root(x: F64, error: F64) -> tuple[F64, F64]:
    """The square root and its error; `x`: never negative."""
    exact = np.sqrt(x)
    return exact, np.sqrt(x + error) - np.sqrt(np.maximum(x - error, 0)) + U * exact


def quotient(above: F64, above_error: F64, below: F64, below_error: F64) -> tuple[F64, F64]:
    exact = above / below
    error = (above_error + np.abs(exact) * below_error) / np.maximum(below - below_error, 0)
    return exact, error + U * np.abs(exact) + LEAST


def adam(row: dict[str, float], w: F64, g: F64, m: F64, v: F64) -> Result:
    g, g_error = scaled(row, w, g)
    old = row["beta1"] * m
    m = row["one_minus_beta1"] * g + old
    m_error = row["one_minus_beta1"] * g_error + U * (np.abs(old) + np.abs(m)) + 2 * LEAST
    part = row["one_minus_beta2"] * g
    old = row["beta2"] * v
    v = part * g + old
    v_error = row["one_minus_beta2"] * (2 * np.abs(g) + g_error) * g_error
    v_error += np.abs(g) * (U * np.abs(part) + LEAST) + U * (old + v) + 2 * LEAST
    size, size_error = root(v, v_error)
    below = size * row["inv_sqrt_bias2"] + row["eps"]
    q, q_error = quotient(m, m_error, below, size_error * row["inv_sqrt_bias2"] + U * below + LEAST)
    kept = row["decay"] * w
    new = kept - row["step_size"] * q
    error = row["step_size"] * q_error + U * (np.abs(kept) + np.abs(new)) + 2 * LEAST
    return Result(new, error, (m, v), (m_error, v_error))


def sgd(row: dict[str, float], w: F64, g: F64) -> Result:
    g, g_error = scaled(row, w, g)
    new = w - row["step_size"] * g
    return Result(new, row["step_size"] * g_error + U * np.abs(new))


def momentum(row: dict[str, float], w: F64, g: F64, state: F64) -> Result:
    g, g_error = scaled(row, w, g)
    old = row["beta1"] * state
    b = row["one_minus_beta1"] * g + old
    b_error = row["one_minus_beta1"] * g_error + U * (np.abs(old) + np.abs(b))
    part = row["one_minus_beta2"] * g
    d = row["beta2"] * b + part
    d_error = row["beta2"] * b_error + row["one_minus_beta2"] * g_error
    d_error += U * (np.abs(part) + np.abs(d))
    new = w - row["step_size"] * d
    return Result(new, row["step_size"] * d_error + U * np.abs(new), (b,), (b_error,))


def lion(row: dict[str, float], w: F64, g: F64, state: F64) -> Result:
    g = row["grad_scale"] * g
    g_error = U * np.abs(g)

    def mixed(old: float, new: float) -> tuple[F64, F64]:
        kept = old * state
        total = new * g + kept
        return total, new * g_error + U * (np.abs(kept) + np.abs(total))

    c, c_error = mixed(row["beta1"], row["one_minus_beta1"])
    m, m_error = mixed(row["beta2"], row["one_minus_beta2"])
    kept = row["decay"] * w
    new = kept - row["step_size"] * np.sign(c)
    error = U * (np.abs(kept) + np.abs(new))
    unsure = np.abs(c) <= c_error + TINY
    return Result(new, np.where(unsure, 2 * row["step_size"] + error, error), (m,), (m_error,))


def adagrad(row: dict[str, float], w: F64, g: F64, state: F64) -> Result:
    g, g_error = scaled(row, w, g)
    old = row["beta1"] * state + row["one_minus_beta1"]
    s = g * g + old
    s_error = (2 * np.abs(g) + g_error) * g_error + U * (old + s) + 2 * LEAST
    size, size_error = root(s, s_error)
    below = size + row["eps"]
    q, q_error = quotient(g, g_error, below, size_error + U * below)
    new = w - row["step_size"] * q
    return Result(new, row["step_size"] * q_error + U * np.abs(new) + LEAST, (s,), (s_error,))


FORMULAS: dict[int, Callable[..., Result]] = {
    lib.SIMD_ADAM: adam, lib.SIMD_SGD: sgd, lib.SIMD_MOMENTUM: momentum, lib.SIMD_LION: lion,
    lib.SIMD_ADAGRAD: adagrad,
}  # fmt: skip


def make_row(algorithm: int, **values: float) -> np.void:
    row = np.zeros((), kernels.ROW)
    row["algorithm"], row["step"] = algorithm, 3
    for name, value in values.items():
        row[name] = value
    return row[()]
