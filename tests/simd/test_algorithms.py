"""SGD, momentum, Lion and Adagrad beside their formulas, and what they report."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from _offload_native import lib
from formula_bounds import F64, FORMULAS, TINY, make_row
from hypothesis import given, settings
from numpy.typing import NDArray

from offload import kernels
from offload.errors import StateError

FIELDS = kernels.ROW.names[2:]
SIZES = (0, 1, 7, 31, 32, 33, 255, 256, 257, 4099)
OTHERS = [algorithm for algorithm in FORMULAS if algorithm != lib.SIMD_ADAM]


def some_row(algorithm: int) -> np.void:
    return make_row(
        algorithm, grad_scale=0.37, l2=0.0 if algorithm == lib.SIMD_LION else 0.013, decay=0.9993,
        beta1=0.9, one_minus_beta1=0.1, beta2=0.73, one_minus_beta2=0.27, step_size=7e-3, eps=1e-10,
    )  # fmt: skip


def states_of(algorithm: int, data: NDArray) -> list[kernels.State]:
    return [] if algorithm == lib.SIMD_SGD else [kernels.State("state", data)]


def arrays(n: int, seed: int, spread: float = 1.0) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    wide = {}
    for name in ("w", "g", "state"):
        values = random.standard_normal(n) * np.exp(spread * random.standard_normal(n))
        wide[name] = np.clip(values, -1e37, 1e37).astype("f4")
    wide["state"] = np.abs(wide["state"])  # Adagrad's is a sum of squares
    return wide


def check(found: NDArray, expected: F64, error: F64) -> None:
    excess = np.abs(found.astype(np.float64) - expected) - 1.01 * error - TINY
    assert np.all(excess <= 0), f"{np.argmax(excess)}: {excess.max()}"


@pytest.mark.parametrize("algorithm", OTHERS)
@pytest.mark.parametrize("n", SIZES)
def test_the_kernel_is_the_formula_up_to_its_roundings(algorithm, n):
    row, at = some_row(algorithm), arrays(n, n)
    named = {name: float(row[name]) for name in FIELDS}
    streams = ("w", "g") if algorithm == lib.SIMD_SGD else ("w", "g", "state")
    expected = FORMULAS[algorithm](named, *(at[x].astype("f8") for x in streams))
    before = at["w"].copy()
    kernels.update(kernels.Whole(at["w"]), states_of(algorithm, at["state"]), at["g"], row=row)
    check(at["w"], expected.w, expected.w_error)
    for state, error in zip(expected.states, expected.state_errors, strict=True):
        check(at["state"], state, error)
    assert n == 0 or not np.array_equal(at["w"], before)


@pytest.mark.parametrize("algorithm", OTHERS)
@given(
    n=st.sampled_from(SIZES), seed=st.integers(0, 99), spread=st.sampled_from([1.0, 8.0, 20.0]),
    offset=st.integers(0, 3), grad=st.sampled_from(["float32", "bfloat16", "float16"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_variants_and_cuts_give_the_same_bits(algorithm, n, seed, spread, offset, grad):
    """Every variant, from any address, cut anywhere, on two threads."""
    at = arrays(n + offset, seed, spread)
    gradient = torch.from_numpy(at["g"][offset:].copy()).to(getattr(torch, grad))
    row, cut = some_row(algorithm), n // 3
    results = []
    try:
        for variant in kernels.supported():
            kernels.select(variant)
            for pieces in ([(0, n)], [(0, cut), (cut, n)]):
                w, state = (at[name].copy()[offset:] for name in ("w", "state"))
                for start, stop in pieces:
                    kernels.update(
                        kernels.Whole(w[start:stop]), states_of(algorithm, state[start:stop]),
                        gradient[start:stop], row=row, origin=kernels.Origin(5, start),
                    )  # fmt: skip
                results.append((w.tobytes(), state.tobytes()))
    finally:
        kernels.select(None)
    assert len(set(results)) == 1


@pytest.mark.parametrize("algorithm", OTHERS)
def test_a_split_master_is_the_whole_one_and_threads_change_nothing(algorithm):
    n = 40_000
    at, row = arrays(n, 1), some_row(algorithm)
    hi, lo = np.empty(n, np.uint16), np.empty(n, np.int16)
    kernels.split(at["w"], hi, lo)
    state = at["state"].copy()
    kernels.update(kernels.Whole(at["w"]), states_of(algorithm, at["state"]), at["g"], row=row)
    with kernels.Threads(2) as threads:
        kernels.update(
            kernels.Split(hi, lo), states_of(algorithm, state), at["g"], row=row, threads=threads
        )
    joined = np.empty(n, np.float32)
    kernels.join(hi, lo, joined)
    assert joined.tobytes() == at["w"].tobytes()
    assert state.tobytes() == at["state"].tobytes()


@pytest.mark.parametrize("algorithm", OTHERS)
def test_an_overflowing_master_is_reported(algorithm):
    at = {"w": np.full(40, 3e38, "f4"), "g": np.full(40, -1.0, "f4"), "state": np.ones(40, "f4")}
    row = make_row(
        algorithm, grad_scale=1.0, decay=1.5, one_minus_beta1=1.0, one_minus_beta2=1.0,
        step_size=3e38,
    )  # fmt: skip
    assert kernels.update(
        kernels.Whole(at["w"]), states_of(algorithm, at["state"]), at["g"], row=row
    )


def test_lion_tells_of_what_is_not_finite():
    w, m, g = np.ones(3, "f4"), np.zeros(3, "f4"), np.array([1.0, np.inf, np.nan], "f4")
    states = [kernels.State("exp_avg", m)]
    assert kernels.update(kernels.Whole(w), states, g, row=some_row(lib.SIMD_LION))
    assert np.isnan(w).tolist() == [False, True, True]


def test_lion_leaves_the_weight_where_there_is_no_direction():
    w, m, g = np.ones(5, "f4"), np.zeros(5, "f4"), np.array([0.0, -0.0, 1e-45, -1e-45, 2.0], "f4")
    row = make_row(
        lib.SIMD_LION, grad_scale=1.0, decay=1.0, beta1=0.0, one_minus_beta1=1.0, step_size=0.5
    )
    kernels.update(kernels.Whole(w), [kernels.State("exp_avg", m)], g, row=row)
    assert w.tolist() == [1.0, 1.0, 0.5, 1.5, 0.5]


@pytest.mark.parametrize("algorithm", set(OTHERS) - {lib.SIMD_SGD})
def test_a_missing_state_is_refused(algorithm):
    with pytest.raises(StateError):
        kernels.update(
            kernels.Whole(np.ones(4, "f4")), [], np.ones(4, "f4"), row=some_row(algorithm)
        )
