"""Changes of format: torch's rounding, exact halves, the same bits on every variant."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_arrays import SIZES, TORCH, Array, bits_f32, placed

from offload import kernels

SLABS = Path(__file__).with_name("split_slabs.json")
SLAB_ELEMS = 2**24
SPECIAL = np.array(
    [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F808000,
     0x3F818000, 0x33000000, 0x33000001, 0x387FC000, 0x387FE000, 0x38800000, 0x477FE000,
     0x477FEFFF, 0x477FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001,
     0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF],
    np.uint32,
)  # fmt: skip


def samples(seed: int, n: int) -> Array:
    """All special patterns of both signs, then `n` random ones."""
    random = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    return np.concatenate([SPECIAL, SPECIAL | np.uint32(0x80000000), random])


def as_bits(tensor: torch.Tensor) -> Array:
    width = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.view(width).numpy()


def converted(src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dst = torch.empty(src.shape, dtype=dtype)
    kernels.convert(src, dst)
    return dst


def every_value(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float32:
        return torch.from_numpy(samples(1, 300_000).view(np.float32))
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dst", sorted(TORCH))
@pytest.mark.parametrize("src", sorted(TORCH))
def test_conversion_rounds_as_torch_does(variant: str, src: str, dst: str) -> None:
    values = every_value(TORCH[src])
    got, wanted = converted(values, TORCH[dst]), values.float().to(TORCH[dst])
    nan = wanted.isnan().numpy()
    assert np.array_equal(got.isnan().numpy(), nan)
    assert np.array_equal(as_bits(got)[~nan], as_bits(wanted)[~nan])


@pytest.mark.parametrize("dst", sorted(TORCH))
@pytest.mark.parametrize("src", sorted(TORCH))
def test_all_variants_convert_to_the_same_bits_nan_included(src: str, dst: str) -> None:
    images = set()
    for name in kernels.supported():
        kernels.select(name)
        images.add(as_bits(converted(every_value(TORCH[src]), TORCH[dst])).tobytes())
    assert len(images) == 1


def test_every_nan_becomes_torchs_quiet_bf16_nan(variant: str) -> None:
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    got = converted(torch.from_numpy(nan), torch.bfloat16)
    assert as_bits(got).tolist() == [0x7FC0] * 4
    assert torch.tensor(torch.nan).bfloat16().view(torch.int16).item() == 0x7FC0


@settings(max_examples=40, deadline=None)
@given(n=SIZES, seed=st.integers(0, 2**32 - 1), first=st.integers(0, 70), second=st.integers(0, 70))
def test_halves_join_to_the_same_bits_at_any_size_and_alignment(
    n: int, seed: int, first: int, second: int
) -> None:
    src = placed(bits_f32(np.random.default_rng(seed), n), first)
    bits = src.view(np.uint32)
    for name in kernels.supported():
        kernels.select(name)
        hi, lo = placed(np.zeros(n, np.uint16), second), placed(np.zeros(n, np.int16), first)
        kernels.split(src, hi, lo)
        assert np.array_equal(hi, ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16))
        assert np.array_equal(lo.view(np.uint16), (bits & np.uint32(0xFFFF)).astype(np.uint16))
        joined = placed(np.zeros(n, np.float32), second)
        kernels.join(hi, lo, joined)
        assert joined.tobytes() == src.tobytes()


def test_the_high_half_is_the_nearest_bf16_with_ties_away_from_zero(variant: str) -> None:
    values = samples(2, 100_000)
    values = values[(values & 0x7FFFFFFF) < 0x7F7F8000]
    hi, lo = torch.empty(len(values), dtype=torch.bfloat16), np.empty(len(values), np.int16)
    master = values.view(np.float32)
    kernels.split(master, hi, lo)
    exact, weight = np.abs(master.astype(np.float64)), np.abs(hi.double().numpy())
    step = np.abs((values & 0xFFFF0000).view(np.float32).astype(np.float64))
    above = ((values & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32)
    middle = (step + np.abs(above.astype(np.float64))) / 2
    assert np.array_equal(weight >= middle, exact >= middle)
    assert np.all((weight == step) | (weight == np.abs(above)))


def slab_checksum(slab: int) -> int:
    """Split, join and compare one slab of 2^24 bit patterns; the checksum of its halves."""
    bits = np.arange(slab * SLAB_ELEMS, (slab + 1) * SLAB_ELEMS, dtype=np.uint32)
    hi, lo = np.empty(SLAB_ELEMS, np.uint16), np.empty(SLAB_ELEMS, np.int16)
    kernels.split(bits.view(np.float32), hi, lo)
    joined = np.empty(SLAB_ELEMS, np.float32)
    kernels.join(hi, lo, joined)
    assert np.array_equal(joined.view(np.uint32), bits)
    return zlib.crc32(lo.data, zlib.crc32(hi.data))


@pytest.mark.parametrize("slab", [0, 127, 254])
def test_a_slab_of_bit_patterns_has_its_kept_checksum(slab: int) -> None:
    assert slab_checksum(slab) == json.loads(SLABS.read_text())[slab]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_split_master_is_exact_over_all_bit_patterns() -> None:
    assert [slab_checksum(slab) for slab in range(256)] == json.loads(SLABS.read_text())
