"""Random rounding of state: unbiased, independent over elements, even over steps, and bounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_arrays import SIZES
from state_reference import numbers

from offload import kernels
from offload.kernels import Origin

N = 1 << 20
BITS = {"bfloat16": 16, "int8": 20}
INDICES = pytest.mark.parametrize("index", [0, 1])
DTYPES = pytest.mark.parametrize("dtype", BITS)


def fractions(dtype: str, *, index: int, step: int, key: int = 1, first: int = 0) -> np.ndarray:
    """The numbers of N elements, in [0, 1)."""
    found = kernels.rounding_numbers(N, dtype, index=index, step=step, origin=Origin(key, first))
    return found / 2.0 ** BITS[dtype]


@settings(max_examples=30, deadline=None)
@given(
    n=SIZES.filter(bool), key=st.integers(0, 2**64 - 1), first=st.integers(0, 2**41),
    step=st.integers(0, 2**32 - 1), index=st.integers(0, 1), dtype=st.sampled_from(sorted(BITS)),
)  # fmt: skip
def test_the_numbers_are_those_of_the_documented_mixing_on_every_variant(
    n: int, key: int, first: int, step: int, index: int, dtype: str
) -> None:
    wanted = numbers(n, dtype, index=index, step=step, key=key, first=first)
    for name in kernels.supported():
        kernels.select(name)
        got = kernels.rounding_numbers(n, dtype, index=index, step=step, origin=Origin(key, first))
        assert np.array_equal(got, wanted)


@DTYPES
@INDICES
def test_the_numbers_are_uniform(dtype: str, index: int) -> None:
    """Mean, and a chi-square over 256 classes: five standard deviations."""
    for step, key in ((1, 0), (7, 2**63 + 5)):
        found = fractions(dtype, index=index, step=step, key=key)
        assert abs(found.mean() - 0.5) < 5 / np.sqrt(12 * N) + 2.0 ** -BITS[dtype]
        counts = np.bincount((found * 256).astype(int), minlength=256)
        chi_square = float(((counts - N / 256) ** 2 / (N / 256)).sum())
        assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one, other)[0, 1])


@DTYPES
def test_elements_states_and_tensors_have_independent_numbers(dtype: str) -> None:
    base = fractions(dtype, index=0, step=3)
    limit = 5 / np.sqrt(N)
    for apart in (1, 2, 3, 8, 16, 31, 256, 257, 4096):
        assert abs(correlation(base[:-apart], base[apart:])) < limit
    assert abs(correlation(base, fractions(dtype, index=1, step=3))) < limit
    assert abs(correlation(base, fractions(dtype, index=0, step=3, key=2))) < limit


@DTYPES
@INDICES
def test_the_numbers_of_an_element_fill_the_interval_evenly_over_steps(
    dtype: str, index: int
) -> None:
    """Any run of 1000 steps is closer to uniform than independent numbers would be."""
    elems = 64
    runs = (
        np.array(
            [
                kernels.rounding_numbers(elems, dtype, index=index, step=step, origin=Origin(5))
                for step in range(1000)
            ]
        )
        / 2.0 ** BITS[dtype]
    )
    ordered = np.sort(runs, axis=0)
    discrepancy = np.abs(ordered - (np.arange(1000)[:, None] + 0.5) / 1000).max()
    assert discrepancy < 0.006  # independent numbers: about 0.027, some 0.05


def encode(values: torch.Tensor, dtype: torch.dtype, *, index: int, step: int, key: int):
    scale = torch.zeros(-(-len(values) // 256)) if dtype.itemsize == 1 else None
    state = kernels.State("state", torch.zeros(len(values), dtype=dtype), scale)
    kernels.state_encode(values, state, index=index, step=step, origin=Origin(key))
    decoded = torch.empty_like(values)
    kernels.state_decode(state, decoded)
    return decoded


@pytest.mark.parametrize(
    ("dtype", "index", "relative"),
    [(torch.bfloat16, 0, 2.0**-7), (torch.bfloat16, 1, 2.0**-7), (torch.int8, 0, 2.0**-3),
     (torch.uint8, 1, 2.0**-3)],
)  # fmt: skip
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_rounding_is_unbiased_and_off_by_less_than_a_step_of_the_format(
    dtype: torch.dtype, index: int, relative: float, size: float
) -> None:
    """One value many times: the mean of 2^16 roundings is it within five standard deviations."""
    torch.manual_seed(0)
    magnitudes = size * 10.0 ** (-4 * torch.rand(64).double())
    signs = 1.0 if dtype is torch.uint8 else torch.where(torch.rand(64) < 0.5, -1.0, 1.0)
    for value in (magnitudes * signs).float():
        values = value.repeat(1 << 16)
        values[::256] = size  # the largest of each block
        got = encode(values, dtype, index=index, step=1, key=9)
        kept = got[torch.arange(len(got)) % 256 != 0].double()
        step = relative * abs(float(value)) + (size / 4e5 if dtype is torch.int8 else 0)
        error = (kept - float(value)).abs().max()
        assert error <= 1.001 * step
        spread = max(float(kept.std()), 1e-7 * abs(float(value)))
        assert abs(float(kept.mean()) - float(value)) <= 5 * spread / np.sqrt(len(kept)) + 2e-7 * (
            abs(float(value)) + (size / 4e5)
        )


def slow_average(dtype: torch.dtype, *, independent: bool) -> torch.Tensor:
    """Relative errors after 4000 steps of v <- 0.999 v + 0.001 x from 1 towards x."""
    torch.manual_seed(1)
    target = 10.0 ** (-2 * torch.rand(8192))
    target[::256] = 1.0
    v = torch.ones(8192)
    exact = v.double()
    for step in range(1, 4001):
        key, turn = (step, 1) if independent else (3, step)
        v = encode(0.999 * v + 0.001 * target, dtype, index=1, step=turn, key=key)
        exact = 0.999 * exact + 0.001 * target
    return v.double() / exact - 1


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2.0**-7), (torch.uint8, 2.0**-3)])
def test_a_slow_average_stays_closer_to_its_target_than_with_independent_numbers(
    dtype: torch.dtype, step: float
) -> None:
    """Rounding to nearest would stay at 1; independent numbers walk away."""
    even = slow_average(dtype, independent=False)
    loose = slow_average(dtype, independent=True)
    assert float(even.abs().max()) < 5 * step
    assert float(even.mean().abs()) < step
    assert float(even.square().mean().sqrt()) < 0.6 * float(loose.square().mean().sqrt())


def test_no_square_becomes_zero_unless_its_block_is() -> None:
    values = torch.zeros(512)
    values[:255] = 10.0 ** -torch.linspace(0, 44, 255)
    got = encode(values, torch.uint8, index=1, step=1, key=1)
    assert bool((got[:256] > 0).all())
    assert float(got[255]) < 1e-10 * float(values[0])
    assert not got[256:].any()


@pytest.mark.parametrize(("dtype", "top"), [(torch.int8, 127), (torch.uint8, 255)])
def test_the_largest_of_a_block_is_the_last_code_and_never_runs_over(
    variant: str, dtype: torch.dtype, top: int
) -> None:
    """Any significand of the largest, with the largest random numbers among a block's."""
    torch.manual_seed(0)
    largest = (1 + torch.rand(2000)).repeat_interleave(256)
    state = kernels.State("state", torch.zeros(len(largest), dtype=dtype), torch.zeros(2000))
    kernels.state_encode(largest, state, index=int(dtype is torch.uint8), step=1, origin=Origin(4))
    assert int(state.data.min()) >= top - 1
    assert int(state.data.max()) == top
    assert float((state.data == top).float().mean()) > 0.9999


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_that_cannot_be_encoded_is_reported_and_becomes_nan(bad: float) -> None:
    values = torch.ones(600)
    values[300] = bad
    state = kernels.State("state", torch.zeros(600, dtype=torch.int8), torch.zeros(3))
    assert kernels.state_encode(values, state, index=0, step=1)
    decoded = torch.empty(600)
    kernels.state_decode(state, decoded)
    assert bool(decoded[256:512].isnan().all())
    assert torch.equal(decoded[:256], torch.ones(256))
    assert torch.equal(decoded[512:], torch.ones(88))
