"""The example under offload-train: out of core, interrupted, resumed, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
# 1.8 million parameters: the blocks are units, larger than what stays on the device.
MODEL = ("--layers", "2", "--width", "256", "--heads", "4", "--batch", "2", "--seq", "16",
         "--steps", "8", "--eval-every", "0")  # fmt: skip


INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_lm

add = train_lm.Record.add

def add_and_interrupt(self, **row):
    add(self, **row)
    if row["step"] == 4:
        os.kill(os.getpid(), signal.SIGINT)

train_lm.Record.add = add_and_interrupt
train_lm.main()
"""


def command(drive: Path, *settings: str) -> list[str]:
    drive.mkdir(exist_ok=True)
    return [sys.executable, "-m", "offload.cli.train", "--nvme", str(drive), *settings]


def budgets(host: str = "32MiB", device: str = "32MiB") -> tuple[str, ...]:
    return ("--host-memory", host, "--device-memory", device)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}  # tiny products: threads only wait for each other


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=250, check=False, env=environment()
    )


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in rows(out) if "loss" in row}


def test_training_goes_on_after_an_interruption_as_if_there_had_been_none(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    script = [str(EXAMPLE), *MODEL, "--out"]
    done = run([*command(tmp_path / "a", *budgets()), *script, str(straight)])
    assert done.returncode == 0, done.stderr
    assert "written per step" in done.stderr  # the first lines tell what lives where
    assert sum(row.get("write_bytes", 0) for row in rows(straight)) > 8 * 12 * 1_500_000

    interrupted = tmp_path / "interrupted.py"
    interrupted.write_text(INTERRUPTED.format(examples=str(EXAMPLE.parent)))
    start = [*command(tmp_path / "b", *budgets()), str(interrupted), *MODEL, "--out", str(broken)]
    assert run(start).returncode == 130
    assert len(losses(broken)) == 4

    done = run([*command(tmp_path / "b", "--resume", *budgets()), *script, str(broken)])
    assert done.returncode == 0, done.stderr
    assert losses(broken) == losses(straight)
    assert rows(broken)[-1]["validation_loss"] == rows(straight)[-1]["validation_loss"]


@pytest.mark.parametrize(("host", "device"), [("64kB", "32MiB"), ("32MiB", "64kB")])
def test_a_budget_too_small_is_one_line_and_leaves_nothing_behind(
    host: str, device: str, tmp_path: Path
) -> None:
    drive = tmp_path / "drive"
    done = run(
        [*command(drive, *budgets(host, device)), str(EXAMPLE), *MODEL, "--out", str(tmp_path)]
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("offload-train: ")
    assert not list(drive.iterdir())
