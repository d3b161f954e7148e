"""The plain script with and without `offload-train --auto`: the same numbers, in less memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plain_torch.py"
SMALL = ("--layers", "2", "--width", "256", "--heads", "4", "--length", "32", "--batch", "2",
         "--steps", "6", "--eval-every", "3")  # fmt: skip
# 28.9 million parameters: 116 MB of weights.
LARGE = ("--layers", "4", "--width", "768", "--heads", "4", "--length", "16", "--batch", "1",
         "--steps", "3", "--eval-every", "2")  # fmt: skip
TINY = ("--layers", "1", "--width", "8", "--heads", "1", "--length", "16", "--batch", "1",
        "--steps", "3", "--eval-every", "2")  # fmt: skip
HOST_MIB, DEVICE_MIB = 24, 96
OVERHEAD_BYTES = 24 << 20  # activations, the engine's own objects, the heap
CALM_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def plain(*arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLE), *arguments]


def auto(drive: Path, *arguments: str) -> list[str]:
    drive.mkdir()
    return [
        sys.executable, "-m", "offload.cli.train", "--auto", "--nvme", str(drive),
        "--placement", "disk", "--host-memory", f"{HOST_MIB}MiB",
        "--device-memory", f"{DEVICE_MIB}MiB", str(EXAMPLE), *arguments,
    ]  # fmt: skip


def run(command: list[str]) -> tuple[str, str, int]:
    """Output, log and the largest RssAnon + RssShmem of a command that succeeds."""
    child = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **CALM_HEAP},
    )  # fmt: skip
    peak, ended = [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.002):
            peak.append(max(peak.pop(), held_bytes(child.pid)))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    out, log = child.communicate(timeout=250)
    ended.set()
    sampler.join()
    assert child.returncode == 0, log
    return out, log, peak[0]


def held_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon:", "RssShmem:")))


def numbers(out: str, word: str) -> list[float]:
    lines = [line.split() for line in out.splitlines()]
    return [float(line[line.index(word) + 1]) for line in lines if word in line]


@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_a_plain_script_prints_and_saves_the_same_out_of_core(
    accumulation: str, tmp_path: Path
) -> None:
    """fp32 all the way; the update's last places differ, so losses agree in five digits."""
    settings = (*SMALL, "--accumulation", accumulation)
    theirs, _, _ = run(plain(*settings, "--out", str(tmp_path / "plain.pt")))
    ours, log, _ = run(auto(tmp_path / "drive", *settings, "--out", str(tmp_path / "auto.pt")))
    assert "LanguageModel and its AdamW are taken over" in log
    assert "written per step" in log
    for word in ("loss", "norm", "validation"):
        assert numbers(theirs, word)
        assert numbers(ours, word) == pytest.approx(numbers(theirs, word), rel=2e-5), word
    saved, expected = (torch.load(tmp_path / name) for name in ("auto.pt", "plain.pt"))
    assert saved["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.allclose(saved["model"][name], tensor, rtol=1e-3, atol=2e-5), name
    assert saved["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for index, state in expected["optimizer"]["state"].items():
        for key, tensor in state.items():
            found = saved["optimizer"]["state"][index][key]
            assert torch.allclose(found, tensor, rtol=1e-2, atol=1e-6), (index, key)


def test_the_peak_is_the_weights_once_and_the_host_budget(tmp_path: Path) -> None:
    """The script makes its model before its optimizer; gradients and moments never join it."""
    out = ("--out", str(tmp_path / "out.pt"))
    _, _, imports = run(plain(*TINY, *out))
    text, _, theirs = run(plain(*LARGE, *out))
    _, log, ours = run(auto(tmp_path / "drive", *LARGE, *out))
    assert "taken over" in log
    weights = 4 * int(text.split()[0].replace(",", ""))
    assert theirs - imports > 3.5 * weights  # weights, gradients, two moments
    budgets = (HOST_MIB << 20) + max(weights, DEVICE_MIB << 20)
    assert ours - imports < budgets + OVERHEAD_BYTES, (ours - imports, weights)
