"""Any update against float64: each algorithm, format of state, size, alignment, variant, threads.

The state is decoded to fp32 first, which is exact by definition; the float64 formula starts there.
Masters and fp32 states may be off by their roundings (`formula_bounds`), states in other formats by
a step of the format more: 2^-7 of the value in bf16; in eight bits 1/8 of it, or the first step.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from _offload_native import lib
from formula_bounds import FORMULAS, TINY, make_row
from hypothesis import given, settings
from simd_arrays import OFFSETS, Array, placed
from state_reference import decode, encode

from offload import kernels
from offload.kernels import BLOCK_ELEMS, Origin

NAMES = ("exp_avg", "exp_avg_sq")
FORMATS = {
    "fp32": ("float32", "float32"), "bf16": ("bfloat16", "bfloat16"), "int8": ("int8", "uint8")
}  # fmt: skip
NUM_STATES = {lib.SIMD_ADAM: 2, lib.SIMD_SGD: 0}
SIZES = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 31, 97, 331, 1009, 4099, 8191]),
    st.builds(
        lambda border, by: border + by,
        st.sampled_from([8, 16, 32, 64, 256, 512, 768, 1024, 4096, 8192]),
        st.integers(-2, 2),
    ),
)
EXPONENTS = {  # powers of ten of the master, the gradient and the states
    "usual": ((-3, 1), (-6, 1), (-6, 0)),
    "huge": ((20, 36), (5, 15), (5, 15)),
    "tiny": ((-36, -20), (-44, -15), (-36, -15)),
    "denormal": ((-44, -37), (-44, -37), (-44, -37)),
    "wide": ((-44, 36), (-40, 12), (-40, 12)),
}
MOST = 3.38e38  # what overflows is the subject of other tests
GRADS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def some(rng: np.random.Generator, n: int, exponents: tuple[int, int], *, zeros: float) -> Array:
    values = rng.choice([-1.0, 1.0], n) * 10.0 ** rng.uniform(*exponents, n)
    return np.where(rng.random(n) < zeros, 0, values).astype(np.float32)


class Update:
    """One update's streams, each at its own misalignment, and what float64 makes of them."""

    def __init__(self, algorithm: int, fmt: str, *, n: int, seed: int, spread: str) -> None:
        rng = np.random.default_rng(seed)
        powers = EXPONENTS[spread]
        self.algorithm, self.n = algorithm, n
        self.master = some(rng, n, powers[0], zeros=0.05)
        self.grad = some(rng, n, powers[1], zeros=0.05)
        unsigned = {lib.SIMD_ADAM: (1,), lib.SIMD_ADAGRAD: (0,)}.get(algorithm, ())
        self.codes: list[Array] = []
        self.scales: list[Array | None] = []
        for index in range(NUM_STATES.get(algorithm, 1)):
            state = some(rng, n, powers[2], zeros=0.05)
            name = FORMATS[fmt][int(index in unsigned)]
            values = np.abs(state) if index in unsigned else state
            codes, scale = encode(values, name, np.full(n, 9, np.uint32))
            self.codes.append(codes)
            self.scales.append(scale)

    def decoded(self) -> list[Array]:
        found = zip(self.codes, self.scales, strict=True)
        return [decode(codes, scale) for codes, scale in found]

    def run(self, row: np.void, dtype: torch.dtype, offsets: Any, threads: Any) -> Update:
        """A copy of it after the update."""
        new = object.__new__(Update)
        new.algorithm, new.n = self.algorithm, self.n
        hi, lo = np.empty(self.n, np.uint16), np.empty(self.n, np.int16)
        kernels.split(self.master, hi, lo)
        hi, lo = placed(hi, offsets[0]), placed(lo, offsets[1])
        new.codes = [placed(c, o) for c, o in zip(self.codes, offsets[2:4], strict=False)]
        new.scales = [None if s is None else s.copy() for s in self.scales]
        states = []
        for name, codes, scale in zip(NAMES, new.codes, new.scales, strict=False):
            data: Any = codes
            if codes.dtype == np.uint16:
                data = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16)
            states.append(kernels.State(name, data, scale))
        grad = torch.from_numpy(self.grad.copy()).to(dtype)
        new.grad = grad.float().numpy()
        new.reported = kernels.update(
            kernels.Split(hi, lo), states, grad, row=row, origin=Origin(3, BLOCK_ELEMS),
            threads=threads,
        )  # fmt: skip
        new.master = np.empty(self.n, np.float32)
        kernels.join(hi, lo, new.master)
        return new

    def data(self) -> tuple[Any, ...]:
        scales = [s for s in self.scales if s is not None]
        return (self.reported, *(x.tobytes() for x in (self.master, *self.codes, *scales)))


def rounding(codes: Array, scale: Array | None, exact: Array) -> Array:
    """How far a state may be from what was encoded, by its format."""
    if codes.dtype == np.float32:
        return np.zeros(len(codes))
    if codes.dtype == np.uint16:
        return 2.0**-7 * np.abs(exact) + 2.0**-133
    assert scale is not None
    return np.abs(exact) / 8 * 1.001 + 0.2501 * np.repeat(scale, BLOCK_ELEMS)[: len(codes)]


def a_row(algorithm: int, eps: float, decay: float, scale: float) -> np.void:
    fields = {
        "grad_scale": scale, "decay": 1.0 - decay, "beta1": 0.9, "one_minus_beta1": 0.1,
        "beta2": 0.99, "one_minus_beta2": 0.01, "step_size": 1e-3, "inv_sqrt_bias2": 1.5,
        "eps": eps,
    }  # fmt: skip
    if algorithm in (lib.SIMD_SGD, lib.SIMD_MOMENTUM, lib.SIMD_ADAGRAD):
        fields["l2"] = decay
    if algorithm == lib.SIMD_ADAGRAD:
        fields |= {"beta1": 1.0, "one_minus_beta1": 0.0}
    return make_row(algorithm, **fields)


def check(start: Update, got: Update, row: np.void) -> None:
    named = {name: float(row[name]) for name in kernels.ROW.names[2:]}
    states = [x.astype(np.float64) for x in start.decoded()]
    with np.errstate(all="ignore"):
        wanted = FORMULAS[start.algorithm](
            named, start.master.astype(np.float64), got.grad.astype(np.float64), *states
        )
    sure = np.abs(wanted.w) + wanted.w_error < MOST
    for exact, error in zip(wanted.states, wanted.state_errors, strict=True):
        sure &= np.abs(exact) + error < MOST
    if any(scale is not None for scale in got.scales):  # then a block is NaN as a whole
        starts = np.arange(0, len(sure), BLOCK_ELEMS)
        blocks = np.logical_and.reduceat(sure, starts)
        sure = np.repeat(blocks, BLOCK_ELEMS)[: len(sure)]
    assert not (sure.all() and got.reported)
    away = np.abs(got.master[sure] - wanted.w[sure])
    excess = away - 1.02 * wanted.w_error[sure] - TINY
    assert np.all(excess <= 0), f"master: {excess.max()} above the bound"
    for found, codes, scale, exact, error in zip(
        got.decoded(), got.codes, got.scales, wanted.states, wanted.state_errors, strict=True
    ):
        bound = 1.02 * error + TINY + rounding(codes, scale, np.abs(exact) + error)
        excess = np.abs(found - exact)[sure] - bound[sure]
        assert np.all(excess <= 0), f"state: {excess.max()} above the bound"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("algorithm", FORMULAS)
@settings(max_examples=40, deadline=None)
@given(
    n=SIZES, seed=st.integers(0, 2**32 - 1), spread=st.sampled_from(sorted(EXPONENTS)),
    offsets=OFFSETS, grad=st.sampled_from(sorted(GRADS)), eps=st.sampled_from([1e-8, 1e-30]),
    decay=st.sampled_from([0.0, 0.01]), scale=st.sampled_from([1.0, 0.37]),
    num_threads=st.integers(1, 3),
)  # fmt: skip
def test_an_update_is_the_exact_one_within_its_roundings_and_the_same_on_all_variants(
    algorithm: int, fmt: str, n: int, seed: int, spread: str, offsets: Any, grad: str,
    eps: float, decay: float, scale: float, num_threads: int,
) -> None:  # fmt: skip
    start = Update(algorithm, fmt, n=n, seed=seed, spread=spread)
    row = a_row(algorithm, eps, decay, scale)
    if grad == "float16":
        start.grad = np.clip(start.grad, -6e4, 6e4)
    results = []
    with kernels.Threads(num_threads) as threads:
        for index, name in enumerate(kernels.supported()):
            kernels.select(name)
            at = offsets if index else (0,) * 5
            got = start.run(row, GRADS[grad], at, threads if index else None)
            if not index and n:
                check(start, got, row)
            results.append(got.data())
    assert len(set(results)) == 1


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("algorithm", [lib.SIMD_ADAM, lib.SIMD_ADAGRAD])
def test_zero_eps_with_nothing_to_divide_by_is_reported(
    variant: str, algorithm: int, fmt: str
) -> None:
    """As torch: 0 / 0 is NaN.  Reduced states become NaN with their master."""
    start = Update(algorithm, fmt, n=600, seed=1, spread="usual")
    start.grad[:] = 0
    for codes in start.codes:
        codes[:] = 0
    got = start.run(a_row(algorithm, 0.0, 0.0, 1.0), torch.float32, (0,) * 5, None)
    assert got.reported
    assert bool(np.isnan(got.master).all())
    if fmt != "fp32":
        assert all(np.isnan(state).all() for state in got.decoded())
