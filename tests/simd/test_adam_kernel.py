"""The fused update: the same bits on every variant, near the exact ones, near torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_arrays import (
    OFFSETS,
    SIZES,
    TORCH,
    Array,
    State,
    placed,
    state_of,
    tame_state,
    wild_state,
)
from state_reference import fma

from offload import kernels

FORMATS = st.sampled_from(sorted(TORCH))
SEEDS = st.integers(0, 2**32 - 1)
ROWS = st.builds(
    kernels.adam_row,
    st.sampled_from([0.0, 1e-5, 1e-3, 0.5]),
    st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.95, 0.98)]),
    st.sampled_from([1e-8, 1e-3]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([1, 2, 1000, 10**6]),
    decoupled=st.booleans(),
    grad_scale=st.sampled_from([1.0, 0.37, 2.0**-16]),
)


def updated(start: State, row: np.void, name: str, offsets: Any = (0,) * 5) -> tuple[Any, ...]:
    kernels.select(name)
    state = start.copy(offsets)
    return state.update(row), *state.data()


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, n=SIZES, offsets=OFFSETS, grad_name=FORMATS, row=ROWS, wild=st.booleans())
def test_all_variants_give_the_same_bits_at_any_size_and_alignment(
    seed: int, n: int, offsets: tuple[int, ...], grad_name: str, row: np.void, wild: bool
) -> None:
    start = (wild_state if wild else tame_state)(seed, n, grad_name)
    wanted = updated(start, row, "portable")
    for name in kernels.supported():
        assert updated(start, row, name, offsets) == wanted, name


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, n=SIZES, grad_name=FORMATS, cut=st.floats(0, 1))
def test_a_tensor_cut_in_two_pieces_is_updated_to_the_same_bits(
    seed: int, n: int, grad_name: str, cut: float
) -> None:
    row = kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.01, 3, decoupled=True)
    start, at = tame_state(seed, n, grad_name), int(cut * n)
    whole, pieces = start.copy(), start.copy()
    whole.update(row)
    for piece in (slice(0, at), slice(at, n)):
        State(
            pieces.hi[piece], pieces.lo[piece], pieces.exp_avg[piece],
            pieces.exp_avg_sq[piece], pieces.grad[piece],
        ).update(row)  # fmt: skip
    assert pieces.data() == whole.data()


def formula(start: State, row: np.void) -> tuple[Array, Array, Array]:
    """The update as the kernels define it, operation by operation, in numpy's fp32."""
    k = {name: row[name] for name in kernels.ADAM_ROW.names or ()}
    w = start.master()
    raw = torch.as_tensor(start.grad).float().numpy()
    g = fma(k["l2"], w, k["grad_scale"] * raw)
    m = fma(k["one_minus_beta1"], g, k["beta1"] * start.exp_avg)
    v = fma(k["one_minus_beta2"] * g, g, k["beta2"] * start.exp_avg_sq)
    den = fma(np.sqrt(v), k["inv_sqrt_bias2"], k["eps"])
    return fma(-k["step_size"], m / den, k["decay"] * w), m, v


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, n=SIZES, grad_name=FORMATS, row=ROWS)
def test_every_operation_and_rounding_is_the_documented_one(
    seed: int, n: int, grad_name: str, row: np.void
) -> None:
    state = tame_state(seed, n, grad_name)
    w, m, v = formula(state, row)
    state.update(row)
    # A sum of zero may have either sign.
    assert np.array_equal(state.master(), w)
    assert np.array_equal(state.exp_avg, m)
    assert np.array_equal(state.exp_avg_sq, v)


def exact_step(start: State, row: np.void) -> tuple[Array, Array]:
    """The formula in fp64, and a bound on what fp32 rounding (2^-24 each, 2^-149 below) can add."""
    u, tiny = 2.0**-24, 2.0**-149
    k = {name: float(row[name]) for name in kernels.ADAM_ROW.names or ()}
    raw = torch.as_tensor(start.grad)
    w, m0, v0 = (x.astype(np.float64) for x in (start.master(), start.exp_avg, start.exp_avg_sq))
    scaled = k["grad_scale"] * raw.double().numpy()
    g = k["l2"] * w + scaled
    g_err = u * np.abs(scaled) + u * np.abs(g) + 2 * tiny
    m = k["one_minus_beta1"] * g + k["beta1"] * m0
    m_err = k["one_minus_beta1"] * g_err + u * np.abs(k["beta1"] * m0) + u * np.abs(m) + 2 * tiny
    v = k["one_minus_beta2"] * g * g + k["beta2"] * v0
    square_err = k["one_minus_beta2"] * (2 * np.abs(g) + g_err) * g_err + u * np.abs(
        k["one_minus_beta2"] * g * g
    )
    v_err = square_err + np.abs(g) * tiny + u * np.abs(k["beta2"] * v0) + u * np.abs(v) + 2 * tiny
    root = np.sqrt(v)
    root_err = np.sqrt(v + v_err) - np.sqrt(np.maximum(v - v_err, 0)) + u * root
    den = root * k["inv_sqrt_bias2"] + k["eps"]
    den_err = root_err * k["inv_sqrt_bias2"] + u * den
    step = m / den
    least = den - den_err
    step_err = m_err / least + np.abs(step) * den_err / least + u * np.abs(step) + tiny
    new = k["decay"] * w - k["step_size"] * step
    err = k["step_size"] * step_err + u * np.abs(k["decay"] * w) + u * np.abs(new) + 2 * tiny
    return new, 1.02 * err


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, n=SIZES, grad_name=FORMATS, row=ROWS)
def test_the_update_is_the_exact_one_within_the_rounding_of_each_operation(
    seed: int, n: int, grad_name: str, row: np.void
) -> None:
    start = tame_state(seed, n, grad_name)
    with np.errstate(all="ignore"):
        exact, bound = exact_step(start, row)
    state = start.copy()
    assert not state.update(row)
    assert np.all(np.abs(state.master() - exact) <= bound)


def ulps(got: Array, wanted: Array, lr: float) -> float:
    """The largest difference, in ulp of max(|w|, lr)."""
    unit = np.spacing(np.maximum(np.abs(wanted), np.float32(lr)).astype(np.float32))
    return float(np.max(np.abs(got.astype(np.float64) - wanted) / unit))


@pytest.mark.parametrize(
    ("optimizer", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)]
)
@pytest.mark.parametrize("lr", [1e-4, 1e-2])
def test_each_step_is_within_four_ulp_of_torch(
    variant: str, optimizer: Any, decoupled: bool, lr: float
) -> None:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(20011) * 0.05)
    theirs = optimizer([weight], lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    zeros = np.zeros(weight.numel())
    start = weight.detach().numpy().copy()
    for step in range(1, 9):
        grad = (torch.randn_like(weight) * 0.01 * step).bfloat16()
        kept = theirs.state.get(weight, {})
        ours = state_of(
            weight.detach().numpy(), kept.get("exp_avg", torch.from_numpy(zeros)).numpy(),
            kept.get("exp_avg_sq", torch.from_numpy(zeros)).numpy(), grad,
        )  # fmt: skip
        row = kernels.adam_row(lr, (0.9, 0.999), 1e-8, 0.1, step, decoupled=decoupled)
        assert not ours.update(row)
        weight.grad = grad.float()
        theirs.step()
        assert ulps(ours.master(), weight.detach().numpy(), lr) <= 4
    assert np.mean(start != weight.detach().numpy()) > 0.99


def updated_whole(
    start: State, row: np.void, name: str, weight_name: str | None, *, offsets: Any = (0,) * 5
) -> tuple[Any, ...]:
    """Status, master, moments and weight after the update of a whole master."""
    kernels.select(name)
    state = start.copy(offsets)
    master = placed(start.master(), offsets[0])
    weight = None if weight_name is None else torch.zeros(master.shape, dtype=TORCH[weight_name])
    reported = kernels.adam_whole(
        master, state.exp_avg, state.exp_avg_sq, state.grad, row=row, weight=weight
    )
    image = b"" if weight is None else weight.view(torch.int16).numpy().tobytes()
    return reported, master.tobytes(), *state.data()[2:], image


WEIGHTS = st.sampled_from([None, "bfloat16", "float16"])


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS, n=SIZES, offsets=OFFSETS, grad_name=FORMATS, weight_name=WEIGHTS, row=ROWS,
    wild=st.booleans(),
)  # fmt: skip
def test_a_whole_master_gets_the_same_bits_on_all_variants(
    seed: int, n: int, offsets: Any, grad_name: str, weight_name: str | None, row: Any, wild: bool
) -> None:
    start = (wild_state if wild else tame_state)(seed, n, grad_name)
    wanted = updated_whole(start, row, "portable", weight_name)
    for name in kernels.supported():
        assert updated_whole(start, row, name, weight_name, offsets=offsets) == wanted, name


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, n=SIZES, grad_name=FORMATS, weight_name=WEIGHTS, row=ROWS)
def test_a_whole_master_is_updated_as_a_split_one_and_its_weight_is_it_rounded(
    seed: int, n: int, grad_name: str, weight_name: str | None, row: np.void
) -> None:
    start = tame_state(seed, n, grad_name)
    split = start.copy()
    split.update(row)
    _, master, *moments, weight = updated_whole(start, row, kernels.variant(), weight_name)
    assert master == split.master().tobytes()
    assert moments == list(split.data()[2:])
    if weight_name is not None:
        rounded = torch.from_numpy(split.master()).to(TORCH[weight_name])
        assert weight == rounded.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize(
    ("weight_name", "fits", "overflows"),
    [(None, 3.4e38, np.inf), ("bfloat16", 3.3895e38, 3.4e38), ("float16", 65519.0, 65520.0)],
)
def test_a_weight_that_overflows_its_format_is_reported(
    variant: str, weight_name: str | None, fits: float, overflows: float
) -> None:
    row = kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, decoupled=True)
    zeros = np.zeros(33, np.float32)
    for value, reported in ((fits, False), (-fits, False), (overflows, True), (-overflows, True)):
        master = np.zeros(33, np.float32)
        master[32] = value
        weight = None if weight_name is None else torch.zeros(33, dtype=TORCH[weight_name])
        got = kernels.adam_whole(master, zeros + 0, zeros + 0, zeros, row=row, weight=weight)
        assert got is reported
        if weight is not None:
            assert bool(weight.isinf().any()) is reported


def test_a_clip_factor_scales_the_gradient_as_scaling_it_beforehand_does() -> None:
    start = tame_state(5, 1000, "float32")
    halved = replace(start, grad=start.grad * np.float32(0.5))
    arguments = (1e-3, (0.9, 0.999), 1e-8, 0.01, 2)
    first, second = start.copy(), halved.copy()
    first.update(kernels.adam_row(*arguments, decoupled=True, grad_scale=0.5))
    second.update(kernels.adam_row(*arguments, decoupled=True))
    assert first.data() == second.data()


@pytest.mark.parametrize("at", [0, 31, 32, 70])
@pytest.mark.parametrize("grad", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_is_reported_wherever_it_stands(
    variant: str, at: int, grad: float
) -> None:
    state = tame_state(7, 71, "float32")
    row = kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.01, 2, decoupled=True)
    assert not state.copy().update(row)
    state.grad[at] = grad
    assert state.update(row)


@pytest.mark.parametrize(
    ("bits", "reported"),
    [(0x7F7F7FFF, False), (0xFF7F7FFF, False), (0x7F7F8000, True), (0xFF7F8000, True),
     (0x7F7FFFFF, True), (0x7F800000, True), (0x7FFFFFFF, True), (0xFFFFFFFF, True)],
)  # fmt: skip
@pytest.mark.parametrize("n", [1, 32])
def test_a_master_whose_weight_would_be_infinite_is_reported(
    variant: str, n: int, bits: int, reported: bool
) -> None:
    master = np.zeros(n, np.uint32)
    master[-1] = bits
    zeros = np.zeros(n, np.float32)
    state = state_of(master.view(np.float32), zeros, zeros, zeros.copy())
    row = kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, decoupled=True)
    assert state.update(row) is reported


def test_zero_eps_with_a_zero_moment_is_reported_as_torch_gets_nan() -> None:
    zeros = np.zeros(3, np.float32)
    state = state_of(zeros + 1, zeros, zeros, zeros.copy())
    assert state.update(kernels.adam_row(1e-3, (0.9, 0.999), 0.0, 0.0, 1, decoupled=True))
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    torch.optim.AdamW([weight], eps=0.0, weight_decay=0.0).step()
    assert weight.isnan().all()


def test_the_row_is_rounded_once_from_double() -> None:
    row = kernels.adam_row(3e-4, (0.9, 0.999), 1e-8, 0.1, 7, decoupled=True, grad_scale=1 / 3)
    assert row["grad_scale"] == np.float32(1 / 3)
    assert row["decay"] == np.float32(1 - 3e-4 * 0.1)
    assert row["one_minus_beta2"] == np.float32(1 - 0.999)
    assert row["step_size"] == np.float32(3e-4 / (1 - 0.9**7))
    assert row["inv_sqrt_bias2"] == np.float32((1 - 0.999**7) ** -0.5)
    assert row["l2"] == 0
    coupled = kernels.adam_row(3e-4, (0.9, 0.999), 1e-8, 0.1, 7, decoupled=False)
    assert coupled["l2"] == np.float32(0.1)
    assert coupled["decay"] == 1
