from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from _offload_native import ffi, lib
from hypothesis import given
from hypothesis import strategies as st

from offload import crc

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("portable", "pclmul", "vpclmul", "arm")
MIB = 1 << 20


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    if lib.crc_select(request.param.encode()) < 0:
        pytest.skip(f"{request.param} does not run on this processor")
    yield request.param
    lib.crc_select(ffi.NULL)


def bytes_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def test_every_variant_gives_the_value_of_zlib_at_every_length_and_alignment(variant):
    assert ffi.string(lib.crc_variant()).decode() == variant
    data = bytes_of(2000)
    view = memoryview(data)
    for size in [*range(70), *range(200, 300), 511, 512, 513, 767, 768, 1023, 1024, 1900]:
        for start in (0, 1, 8, 31):
            piece = view[start : start + size]
            assert crc.crc32(piece) == zlib.crc32(piece)
            assert crc.crc32(piece, 0x12345678) == zlib.crc32(piece, 0x12345678)


def test_every_variant_sees_every_flipped_bit_of_a_long_message(variant):
    data = bytearray(bytes_of(1100))
    whole = crc.crc32(data)
    for bit in range(0, 8 * len(data), 7):
        data[bit // 8] ^= 1 << bit % 8
        assert crc.crc32(data) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_an_unknown_variant_is_refused_and_the_old_one_stays():
    before = lib.crc_variant()
    assert lib.crc_select(b"sse9") < 0
    assert lib.crc_variant() == before


def test_the_environment_can_force_the_portable_variant():
    code = "from _offload_native import ffi, lib; print(ffi.string(lib.crc_variant()).decode())"
    env = {**os.environ, "OFFLOAD_SIMD": "portable"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.stdout.strip() == "portable", ran.stderr


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.randoms())
def test_pieces_in_any_order_make_the_whole(sizes, order):
    data = bytes_of(sum(sizes), seed=sum(sizes))
    stops = np.cumsum(sizes).tolist()
    pieces = list(zip([0, *stops[:-1]], stops, strict=True))
    order.shuffle(pieces)
    total = 0
    for start, stop in pieces:
        total = crc.join(crc.crc32(data[start:stop]), total, len(data) - stop)
    assert total == zlib.crc32(data)


@given(*[st.integers(0, bound) for bound in (2**32 - 1, 2**62, 2**62)])
def test_shifts_add_up_at_any_length(value, first, second):
    assert lib.crc_shift(lib.crc_shift(value, first), second) == lib.crc_shift(
        value, first + second
    )


@pytest.mark.parametrize("start", [0, 1, MIB - 1, MIB, MIB + 4096, 2 * MIB])
@pytest.mark.parametrize("tail", [0, 1, 5000, MIB, 2 * MIB + 17])
def test_a_tail_completes_the_sums_of_the_updated_part(start, tail):
    data = bytes_of(start + tail, seed=start)

    def sums(raw: bytes) -> list[int]:
        return [zlib.crc32(raw[at : at + MIB]) for at in range(0, len(raw), MIB)]

    updated = np.array(sums(data[:start]), np.uint64)
    whole = crc.Tail.of(data[start:], start).complete(updated)
    assert whole.tolist() == sums(data)
    assert whole.dtype == np.uint64
    assert updated.tolist() == sums(data[:start]), "the argument stays as it was"


@pytest.mark.skipif(platform.machine() == "aarch64", reason="runs here without an emulator")
def test_the_instructions_of_arm_agree_under_an_emulator(tmp_path):
    compiler, emulator = "aarch64-linux-gnu-gcc", shutil.which("qemu-aarch64")
    if shutil.which(compiler) is None or emulator is None:
        pytest.skip("needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user")
    program = tmp_path / "crc_bits"
    subprocess.run(
        [compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-static",
         "-pthread", f"-I{ROOT / 'csrc'}", *sorted(ROOT.glob("csrc/crc/*.c")),
         ROOT / "tests/crc/crc_bits.c", "-o", program],
        check=True,
    )  # fmt: skip
    ran = subprocess.run([emulator, program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()) == (0, ["portable", "arm"])
