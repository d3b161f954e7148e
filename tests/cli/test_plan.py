"""`offload plan`: a script's plan, with nothing reserved, written or trained."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from torch import nn
from offload import OffloadEngine
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
try:
    engine = OffloadEngine(model, param_persistence_threshold=0)
except Exception:
    print("caught")
print("trained", file=open(sys.argv[1], "w"))
"""


def offload_plan(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "offload.cli.main", "plan", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, cwd=cwd,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_plan_is_printed_and_nothing_is_done(script, tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    trained = tmp_path / "trained"
    run = offload_plan(
        *("--nvme", drive, "--host-memory", "64MiB", "--metrics", tmp_path / "m.jsonl"),
        *(script, trained),
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert "3 x 4,160" in run.stdout
    assert "bound   not known" in run.stdout
    assert list(drive.iterdir()) == []
    assert not trained.exists()
    assert not (tmp_path / "m.jsonl").exists()


def test_the_command_line_tells_the_order_of_micro_steps(tmp_path):
    several = tmp_path / "several.py"
    several.write_text(SCRIPT.replace("threshold=0", "threshold=0, gradient_accumulation_steps=2"))
    for order, told in (("layer", "unit by unit (layer-major)"), ("horizontal", "one after anot")):
        run = offload_plan("--nvme", tmp_path, "--order", order, several, "x", cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert f"2 micro-steps {told}" in run.stdout


def test_a_script_names_its_folder_or_is_told_to(script, tmp_path):
    run = offload_plan("--host-memory", "64MiB", script, "x", cwd=tmp_path)
    assert run.returncode == 2
    assert "expected it to make an OffloadEngine" in run.stderr  # it caught the engine's error
    own = tmp_path / "own.py"
    own.write_text(SCRIPT.replace("threshold=0", f"threshold=0, nvme_path={str(tmp_path)!r}"))
    run = offload_plan("--host-memory", "64MiB", own, "x", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "3 x 4,160" in run.stdout


def test_options_of_a_model_are_none_of_a_script(script, tmp_path):
    for option in ("--json", "--measure"):
        run = offload_plan("--nvme", tmp_path, option, script, "x", cwd=tmp_path)
        assert run.returncode == 2
        assert "No such option" in run.stderr
        assert option in run.stderr


def test_what_stands_in_the_way_is_one_line(tmp_path):
    silent, plain = tmp_path / "silent.py", tmp_path / "plain.py"
    silent.write_text("")
    plain.write_text(SCRIPT.replace("except Exception", "except ZeroDivisionError"))
    for arguments, told in (
        ((silent,), "expected it to make an OffloadEngine"),
        (("--host-memory", "4KiB", plain, "x"), "host_memory is too small"),
    ):
        run = offload_plan("--nvme", tmp_path, *arguments, cwd=tmp_path)
        assert run.returncode == 2
        assert told in run.stderr
        assert len(run.stderr.splitlines()) == 1
        assert not (tmp_path / "x").exists()
