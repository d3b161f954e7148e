"""The C queue under the sanitizers, with several threads and callbacks that submit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import aio
from aio.native import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, built with one sanitizer."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("stress") / "stress"
    sources = [str(ROOT / "tests/aio/stress.c"), *map(str, sorted(ROOT.glob("csrc/aio/*.c")))]
    flags = [*FLAGS, f"-fsanitize={request.param}", "-fno-sanitize-recover=all"]
    build = [compiler, *flags, *sources, "-o", str(program)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip(f"the sanitizer is not installed: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("name", ["uring", "libaio", "threads", "faults"])
def test_threads_and_callbacks_under_a_sanitizer(stress: Path, path: Path, name: str) -> None:
    error = aio.probe().backends.get(name)
    if error is not None:
        pytest.skip(f"{name} does not work here: {error}")
    done = subprocess.run(
        [str(stress), str(BACKENDS[name]), str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitizer does not run on this kernel")
    assert (done.returncode, done.stderr) == (0, "")
