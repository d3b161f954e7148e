"""`benchmarks/gpu_check.py`, as far as a machine without a GPU can tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_that_nothing_was_checked(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path / "out.json"))
    assert ended.returncode == 1
    assert "no CUDA device: nothing was checked" in ended.stderr
    assert not (tmp_path / "out.json").exists()


def test_its_options_are_checked() -> None:
    assert run("--rounds", "0").returncode == 2
    told = run("--help").stdout
    assert all(name in told for name in ("--folder", "--out", "--trace", "--timeline", "--width"))


def test_copies_beside_kernels_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    def event(kind: str, name: str, start: float, duration: float) -> dict:
        return {"cat": kind, "name": name, "ts": start, "dur": duration}

    found = gpu_check.overlap([
        event("kernel", "gemm", 0, 10), event("kernel", "add", 5, 10),  # 0 to 15
        event("kernel", "gemm", 20, 10),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 10),  # half of it beside
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 22, 4),
        event("cpu_op", "aten::mm", 0, 100), {"ph": "M", "name": "process_name"},
    ])  # fmt: skip
    assert found["kernel_s"] == pytest.approx(25e-6)
    assert found["HtoD_beside_kernels"] == pytest.approx(0.5)
    assert found["DtoH_beside_kernels"] == pytest.approx(1.0)
