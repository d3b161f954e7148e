"""Which variant runs: forced in a fresh process; other processors' under emulation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offload import kernels

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off",
         "-fno-math-errno", "-pthread"]  # fmt: skip


def child(code: str, variant: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "OFFLOAD_SIMD"}
    if variant is not None:
        environment["OFFLOAD_SIMD"] = variant
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


NAME = "from _offload_native import ffi, lib; print(ffi.string(lib.simd_variant()).decode())"


def test_the_environment_forces_the_variant(variant: str) -> None:
    ran = child(NAME, variant)
    assert ran.stdout.split() == [variant], ran.stderr


def test_without_it_the_best_variant_runs() -> None:
    best = kernels.supported()[0]
    assert child(NAME, None).stdout.split() == [best]
    assert child(NAME, "").stdout.split() == [best]


def test_an_environment_that_names_no_variant_is_one_clear_error() -> None:
    ran = child("from offload import kernels; kernels.variant()", "sse9")
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last
    assert "OFFLOAD_SIMD" in last
    assert "got 'sse9'" in last


def built(compiler: str, folder: Path, *flags: str) -> Path:
    program = folder / f"bits-{Path(compiler).name}"
    sources = sorted(str(path) for path in (ROOT / "csrc/simd").glob("*.c"))
    here = str(Path(__file__).with_name("variant_bits.c"))
    command = [compiler, *FLAGS, *flags, f"-I{ROOT}/csrc/simd", here, *sources, "-lm"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def bits(program: Path, variant: str, *emulator: str) -> str:
    environment = {**os.environ, "OFFLOAD_SIMD": variant}
    ran = subprocess.run(
        [*emulator, str(program)], env=environment, capture_output=True, text=True, check=True
    )
    name, *rest = ran.stdout.splitlines()
    assert name == variant
    return "\n".join(rest)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("cc", tmp_path_factory.mktemp("native"))


def test_the_program_that_prints_bits_sees_no_difference_among_native_variants(
    native: Path,
) -> None:
    assert len({bits(native, name) for name in kernels.supported()}) == 1


def test_neon_gives_the_bits_of_the_portable_variant_under_emulation(
    native: Path, tmp_path: Path
) -> None:
    compiler, emulator = "aarch64-linux-gnu-gcc", shutil.which("qemu-aarch64")
    if shutil.which(compiler) is None or emulator is None:
        pytest.skip("needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user")
    theirs = built(compiler, tmp_path, "-static")
    wanted = bits(native, "portable")
    assert bits(theirs, "portable", emulator) == wanted
    assert bits(theirs, "neon", emulator) == wanted
