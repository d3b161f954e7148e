"""`benchmarks/gpu_check.py`, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_that_nothing_was_checked(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path))
    assert ended.returncode == 1
    assert "no CUDA device: nothing was checked" in ended.stderr
    assert json.loads((tmp_path / "result.json").read_text())["parts"].keys() == {"machine"}


def test_its_options_are_checked() -> None:
    assert run("--steps", "0").returncode == 2
    told = run("--help").stdout
    assert all(name in told for name in ("--folder", "--out", "--limit", "--dry-run", "--width"))


@pytest.mark.parametrize(
    "parts", [("memory", "streamed"), pytest.param((), marks=pytest.mark.slow, id="all")]
)
def test_a_dry_run_goes_through_the_parts_on_the_processor(
    parts: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = [option for part in parts for option in ("--part", part)]
    ended = run("--dry-run", "--out", str(tmp_path), "--folder", str(tmp_path), *chosen)
    assert ended.returncode == 0, ended.stdout
    found = json.loads((tmp_path / "result.json").read_text())
    assert all(part["status"] == 0 for part in found["parts"].values())
    compared = found["checks"].values()
    assert len(compared) == (1 if parts else 3)
    assert all(each["largest_loss_difference"] < 0.05 for each in compared)
    assert (tmp_path / "streamed-timeline.json").exists()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check
    import gpu_step

    return gpu_check, gpu_step


def test_a_part_that_fails_or_hangs_costs_no_other(scripts, monkeypatch, tmp_path: Path) -> None:
    check, _ = scripts

    def command(self, part: str) -> list[str]:
        first = f"open({str(self.result(part))!r}, 'w').write('{{}}'); print('begun', flush=True);"
        rest = {"tests": "raise SystemExit(3)", "memory": "import time; time.sleep(60)"}
        return [sys.executable, "-c", f"{first} {rest.get(part, '')}"]

    monkeypatch.setattr(check.Check, "command", command)
    monkeypatch.setitem(check.LIMITS_S, "memory", 2)
    with pytest.raises(SystemExit) as ended:
        check.main(["--dry-run", "--out", str(tmp_path)], standalone_mode=False)
    assert ended.value.code
    parts = json.loads((tmp_path / "result.json").read_text())["parts"]
    told = {part: found["status"] for part, found in parts.items()}
    assert told == {**dict.fromkeys(check.LIMITS_S, 0), "tests": 3, "memory": "timeout"}
    assert all(found["tail"] == ["begun"] for found in parts.values())


def test_all_of_it_takes_less_than_eight_minutes(scripts) -> None:
    check, _ = scripts
    (limit,) = [option.default for option in check.main.params if option.name == "limit"]
    assert limit < 480


def test_copies_beside_kernels_are_counted_once(scripts) -> None:
    _, step = scripts

    def event(kind: str, name: str, start: float, duration: float) -> dict:
        return {"cat": kind, "name": name, "ts": start, "dur": duration}

    found = step.overlap([
        event("kernel", "gemm", 0, 10), event("kernel", "add", 5, 10),  # 0 to 15
        event("kernel", "gemm", 20, 10),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 10),  # half of it beside
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 22, 4),
        event("cpu_op", "aten::mm", 0, 100), {"ph": "M", "name": "process_name"},
    ])  # fmt: skip
    assert found["kernel_s"] == pytest.approx(25e-6)
    assert found["HtoD_beside_kernels"] == pytest.approx(0.5)
    assert found["DtoH_beside_kernels"] == pytest.approx(1.0)
    kernels, copies_in, copies_out = found["picture"]
    assert "#" in kernels
    assert copies_in.count("#") > copies_out.count("#") > 0
