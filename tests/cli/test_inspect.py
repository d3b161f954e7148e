"""offload inspect: what lies where, whose it is, whether it is whole, and what dead jobs left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch

from offload import OffloadEngine
from offload.cli import main, shell

TRAIN = """
import os, signal, sys
import models, torch
from offload import OffloadEngine
engine = OffloadEngine(
    models.build(models.Decoder), nvme_path=sys.argv[1], host_memory="120kB",
    param_persistence_threshold=0,
)
for index in range(2):
    engine.backward(engine(*models.batch(index)))
    engine.step()
engine.save_checkpoint(sys.argv[2], "first").wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> list[str]:
    try:
        shell.parse(main.command, ["inspect", *map(str, arguments)])
        found = 0
    except SystemExit as left:
        found = int(left.code or 0)
    out = capsys.readouterr().out
    assert found == status, out
    return [line.strip() for line in out.splitlines()]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    drive, checkpoints = tmp_path / "drive", tmp_path / "checkpoints"
    drive.mkdir()
    return drive, checkpoints


def train(drive: Path, checkpoints: Path) -> OffloadEngine:
    engine = OffloadEngine(
        models.build(models.Decoder), nvme_path=drive, name="job", device="cpu",
        host_memory="16MiB", compute_dtype=torch.float32, param_persistence_threshold=0,
    )  # fmt: skip
    for index in range(2):
        engine.backward(engine(*models.batch(index)))
        engine.step()
    engine.save_checkpoint(checkpoints, "a")
    engine.save_checkpoint(checkpoints, "b").wait()
    return engine


def test_it_lists_stores_and_checkpoints_and_who_holds_them(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = train(*folders)
    lines = inspect(capsys, *folders)
    assert lines[0] == f"store job in {folders[0] / 'offload-job'}"
    assert f"in use by process {os.getpid()}" in lines
    assert [line for line in lines if line.startswith('generation 2 (durability="process"')]
    assert f"checkpoint {folders[1] / 'a'}" in lines
    assert f"checkpoint {folders[1] / 'b'} (latest)" in lines
    assert [line for line in lines if line.startswith("step 2, generation 2, saved ")]
    engine.close()
    assert not [line for line in inspect(capsys, folders[0]) if "in use" in line]
    assert inspect(capsys, folders[0] / "offload-job") == inspect(capsys, folders[0])


def test_verify_reads_all_of_both_and_names_what_is_damaged(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    train(*folders).close()
    lines = inspect(capsys, *folders, "--verify")
    num_units = len(list(folders[1].joinpath("a").glob("0*")))
    assert lines.count(f"verified: {num_units} of {num_units} units") == 3
    victim = next(folders[1].joinpath("a").glob("00001-*"))
    with victim.open("r+b") as file:
        file.seek(5000)
        file.write(b"rot")
    lines = inspect(capsys, *folders, "--verify", status=1)
    damaged = [line for line in lines if line.startswith("DAMAGED")]
    assert len(damaged) == 3  # the store and both checkpoints share the file
    assert all("unit 'blocks.0'" in line and "param, block 0" in line for line in damaged)
    os.truncate(victim, 5000)
    assert len([x for x in inspect(capsys, *folders, status=1) if "truncated" in x]) == 3


def test_what_a_killed_job_left_is_listed_and_reclaimed(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = os.pathsep.join([str(Path(models.__file__).parent), *sys.path])
    command = [sys.executable, "-c", TRAIN, *map(str, folders)]
    dead = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert dead.returncode == -signal.SIGKILL
    half = folders[1] / ".second.saving"
    half.mkdir()
    (half / "00000-embed.r0.A").write_bytes(b"x" * 8192)
    before = inspect(capsys, *folders)
    assert f"left-over {half}: 8.0 KiB" in before
    assert [line for line in before if line.endswith("can be reclaimed")]  # spilled gradients
    after = inspect(capsys, *folders, "--reclaim")
    assert after[-1].endswith("reclaimed")
    assert not half.exists()
    assert not list(folders[0].glob("*/scratch-*"))
    clean = inspect(capsys, *folders, "--verify")
    assert not [line for line in clean if "left-over" in line or "can be reclaimed" in line]
    assert f"checkpoint {folders[1] / 'first'} (latest)" in clean


def test_an_empty_directory_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(capsys, tmp_path) == [f"no store and no checkpoint in {tmp_path}"]
    assert inspect(capsys, tmp_path / "nowhere", status=shell.IMPOSSIBLE) == []
