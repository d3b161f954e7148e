"""Gradients on their way out: rounded once, kept or added; the norm is the same however cut."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_arrays import SIZES, TORCH, Array, bits_f32, placed, to_format

from offload import kernels

SEEDS = st.integers(0, 2**32 - 1)
FORMATS = st.sampled_from(sorted(TORCH))


def same_values(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bits, except that a NaN may be any NaN."""
    got, wanted = got.float(), wanted.float()
    nan = got.isnan()
    equal = got.view(torch.int32) == wanted.view(torch.int32)
    return bool(torch.all(torch.where(nan, wanted.isnan(), equal)))


def reduced(lanes: Array) -> float:
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


def running_sum(values: Array) -> Array:
    """The norm's definition, word for word: blocks of 1024, sixteen lanes by index in the block."""
    norm = np.zeros((), kernels.NORM)
    lanes, total, nonfinite = np.zeros(16), 0.0, 0
    for start in range(0, len(values), 16):
        row = values[start : start + 16].astype(np.float64)
        finite = np.isfinite(row)
        nonfinite += np.count_nonzero(~finite)
        lanes[: len(row)][finite] += row[finite] * row[finite]
        if (start + len(row)) % 1024 == 0:
            total, lanes = total + reduced(lanes), np.zeros(16)
    norm["lanes"], norm["total"] = lanes, total
    norm["count"], norm["nonfinite"] = len(values), nonfinite
    return norm


@settings(max_examples=50, deadline=None)
@given(
    seed=SEEDS, n=SIZES, name=FORMATS, cuts=st.lists(st.floats(0, 1), max_size=4),
    bad=st.lists(st.floats(0, 1), max_size=2),
)  # fmt: skip
def test_the_norm_has_the_same_bits_for_any_variant_and_any_cut(
    seed: int, n: int, name: str, cuts: list[float], bad: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(n) * 10.0 ** rng.uniform(-4, 4, n)).astype(np.float32)
    for at in bad:
        values[int(at * n) : int(at * n) + 1] = np.inf
    src = to_format(values, name)
    wanted = running_sum(src.float().numpy())
    borders = sorted({0, n, *(int(cut * n) for cut in cuts)})
    for variant in kernels.supported():
        kernels.select(variant)
        norm = kernels.Norm(2)
        for first, last in itertools.pairwise(borders):
            kernels.norm_add(src[first:last], norm, 1)
        assert norm.sums[1].tobytes() == wanted.tobytes()
        assert norm.sums[0].tobytes() == bytes(kernels.NORM.itemsize)
        if not wanted["nonfinite"]:
            assert norm.value(1) == float(wanted["total"]) + reduced(wanted["lanes"])


def test_the_norm_is_the_exact_one_within_the_rounding_of_its_additions(variant: str) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(50_000) * 10.0 ** rng.uniform(-20, 15, 50_000)).astype(np.float32)
    norm = kernels.Norm(1)
    kernels.norm_add(values, norm, 0)
    exact = math.fsum(float(x) ** 2 for x in values)
    additions = 64 + 4 + 49  # of one lane, of the halves, of the blocks
    assert abs(norm.value(0) - exact) <= additions * 2.0**-53 * exact


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 5, 500, 1023, 1024, 1090])
def test_an_element_that_is_not_finite_is_counted_and_spoils_the_norm(
    variant: str, bad: float, at: int
) -> None:
    values = np.ones(1091, np.float32)
    values[[at, 77]] = bad, math.inf
    norm = kernels.Norm(2)
    kernels.norm_add(values, norm, 0)
    kernels.norm_add(np.ones(3, np.float32), norm, 1)
    assert [norm.nonfinite(0), norm.nonfinite(1)] == [2, 0]
    assert math.isnan(norm.value(0))
    assert math.isnan(norm.total())
    norm.reset()
    assert [norm.nonfinite(0), norm.total()] == [0, 0.0]


def test_the_total_adds_the_tensors_in_their_order() -> None:
    norm = kernels.Norm(3)
    for index, value in enumerate([1e8, 1.0, 1.0]):
        kernels.norm_add(np.full(1, value, np.float32), norm, index)
    assert norm.total() == (1e16 + 1.0 + 1.0) ** 0.5  # 1e16 + 2.0 would differ
    with pytest.raises(Exception, match="below 3, got 3"):
        norm.value(3)


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS, n=SIZES, src_name=FORMATS, round_name=FORMATS, accumulate=st.booleans(),
    wide=st.booleans(), offset=st.integers(0, 70),
)  # fmt: skip
def test_a_contribution_is_rounded_once_then_kept_or_added_on_every_variant(
    seed: int, n: int, src_name: str, round_name: str, accumulate: bool, wide: bool, offset: int
) -> None:
    rng = np.random.default_rng(seed)
    src = to_format(bits_f32(rng, n), src_name)
    before = rng.standard_normal(n).astype(np.float32)
    rounded = src.float().to(TORCH[round_name])
    wanted = torch.from_numpy(before) + rounded.float() if accumulate else rounded
    images = set()
    for variant in kernels.supported():
        kernels.select(variant)
        norm = kernels.Norm(1)
        if accumulate or wide:
            kept = placed(before, offset)
            kernels.grad_take(
                src, kept, round_to=TORCH[round_name], accumulate=accumulate, norm=norm
            )
            got, image = torch.from_numpy(np.array(kept)), kept.tobytes()
        else:
            got = torch.empty(n, dtype=TORCH[round_name])
            kernels.grad_take(src, got, round_to=TORCH[round_name], accumulate=False, norm=norm)
            image = got.view(torch.uint8).numpy().tobytes()
        assert same_values(got, wanted)
        again = kernels.Norm(1)
        kernels.norm_add(got, again, 0)
        assert again.sums.tobytes() == norm.sums.tobytes()
        nan = np.isnan(got.float().numpy()).tobytes()
        images.add((image if not got.isnan().any() else nan, norm.sums.tobytes()))
    assert len(images) == 1


def test_a_contribution_may_arrive_in_pieces_of_any_size(variant: str) -> None:
    src = torch.randn(5000).bfloat16()
    whole, pieces = torch.zeros(5000), torch.zeros(5000)
    norms = kernels.Norm(2)
    kernels.grad_take(src, whole, round_to=torch.bfloat16, accumulate=True, norm=norms, index=0)
    for first, last in itertools.pairwise([0, 1, 18, 1000, 1024, 3333, 5000]):
        kernels.grad_take(
            src[first:last], pieces[first:last], round_to=torch.bfloat16, accumulate=True,
            norm=norms, index=1,
        )  # fmt: skip
    assert torch.equal(whole, pieces)
    assert norms.sums[0].tobytes() == norms.sums[1].tobytes()
