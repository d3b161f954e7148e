from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = {"uring": "1", "libaio": "2", "threads": "3"}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_errors_and_early_ends_leave_the_sanitizers_silent(sanitizer, tmp_path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    program = tmp_path / "stress"
    sources = sorted(ROOT.glob("csrc/*/*.c"))
    subprocess.run(
        [compiler, "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", "-fno-math-errno",
         "-ffp-contract=off", f"-fsanitize={sanitizer}", f"-I{ROOT / 'csrc'}", *sources,
         ROOT / "tests/optim/stress.c", "-lm", "-o", program],
        check=True,
    )  # fmt: skip
    # ThreadSanitizer cannot place its shadow memory under every randomised layout.
    fixed_layout = ["setarch", "-R"] if shutil.which("setarch") else []
    for name, number in BACKENDS.items():
        ended = subprocess.run(
            [*fixed_layout, program, tmp_path / "data", "120", number],
            capture_output=True,
            text=True,
            timeout=250,
        )
        if ended.returncode == 3:
            continue  # this backend does not work here
        assert ended.returncode == 0, f"{name}: {ended.stderr}"
        assert int(ended.stdout.split()[1]) >= 72, ended.stdout  # those that nothing was done to
