"""offload-train: the script behaves as under plain python; mistakes are one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offload.cli import shell, train
from offload.errors import BudgetError, ConfigError, OffloadError, StoreError

SCRIPT = """
import os, signal, sys
import beside

class Unpicklable: pass

def fail(): raise ValueError("from the script")

match sys.argv[1]:
    case "tell":
        import pickle
        assert pickle.loads(pickle.dumps(Unpicklable())).__class__ is Unpicklable
        print(sys.argv, __name__, os.environ["OFFLOAD_NVME"], os.environ["OFFLOAD_RESUME"])
    case "fail": fail()
    case "exit": sys.exit(7)
    case "interrupt": os.kill(os.getpid(), signal.SIGINT)
    case "terminate":
        import atexit
        atexit.register(print, "closed")
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    folder = tmp_path / "drive"
    folder.mkdir()
    return folder


def offload_train(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offload.cli.train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_script_finds_its_arguments_its_neighbours_and_the_settings(
    script: Path, drive: Path
) -> None:
    done = offload_train("--nvme", drive, "--fresh", script, "tell", "--nvme", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("] ")[0] == f"['{script}', 'tell', '--nvme', 'x'"
    assert done.stdout.split("] ")[1].split() == ["__main__", str(drive), "fresh"]


def test_the_traceback_is_that_of_plain_python(script: Path, drive: Path) -> None:
    plain = subprocess.run(
        [sys.executable, str(script), "fail"], capture_output=True, text=True, check=False
    )
    ours = offload_train("--nvme", drive, script, "fail")
    assert "from the script" in ours.stderr
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


def test_the_exit_status_is_that_of_the_script(script: Path, drive: Path) -> None:
    assert offload_train("--nvme", drive, script, "exit").returncode == 7


@pytest.mark.parametrize(("how", "number"), [("interrupt", signal.SIGINT), ("terminate", 15)])
def test_a_signal_unwinds_the_script_and_gives_its_status(
    how: str, number: int, script: Path, drive: Path
) -> None:
    done = offload_train("--nvme", drive, script, how)
    assert done.returncode == 128 + number
    assert ("closed" in done.stdout) == (how == "terminate")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("durability: expected step, got 'stop'."), 2),
        (BudgetError("host_memory:\n  expected 2 GiB, got 1 GiB."), 2),
        (StoreError("/mnt: expected 2 GiB free, got 1 GiB."), 1),
    ],
)
def test_what_the_engine_refuses_is_one_line(
    error: OffloadError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.report(error) == status
    line = "offload-train: " + " ".join(str(error).split())
    assert capsys.readouterr().err == line + "\n"


def parse(*arguments: object) -> train.Job:
    job = shell.parse(train.command, [str(item) for item in arguments])
    assert isinstance(job, train.Job)
    return job


def test_settings_become_the_variables_that_the_engine_reads(
    script: Path, drive: Path, tmp_path: Path
) -> None:
    job = parse(
        *("--nvme", drive, "--nvme", tmp_path, "--host-memory", "2GiB", "--device-memory", "1GB"),
        *("--resume", "--durability", "step", "--aio-backend", "threads", script, "--resume"),
    )
    assert job.arguments == ("--resume",)
    assert job.environment == {
        "OFFLOAD_NVME": f"{drive}{os.pathsep}{tmp_path}",
        "OFFLOAD_HOST_MEMORY": str(2 << 30),
        "OFFLOAD_DEVICE_MEMORY": str(10**9),
        "OFFLOAD_RESUME": "resume",
        "OFFLOAD_DURABILITY": "step",
        "OFFLOAD_AIO_BACKEND": "threads",
    }


def test_a_configuration_file_stands_for_a_folder(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("{bf16: {enabled: true}}")
    for option in ("--config", "--deepspeed_config"):
        assert parse(option, path, script).environment == {"OFFLOAD_CONFIG": str(path)}
    later = parse(script, "--deepspeed_config", "ds.json")  # which the script reads itself
    assert (later.environment, later.arguments) == ({}, ("--deepspeed_config", "ds.json"))


def test_a_script_may_name_the_folder_itself(
    script: Path, drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nobody does, the engine's error tells both ways."""
    assert parse("--fresh", script).environment == {"OFFLOAD_RESUME": "fresh"}
    monkeypatch.setenv("OFFLOAD_NVME", str(drive))
    assert parse("--auto", "--fresh", script).auto
    monkeypatch.setenv("OFFLOAD_RESUME", "resume")
    with pytest.raises(SystemExit):
        parse("--auto", script)
    assert "--resume: expected it without --auto" in capsys.readouterr().err


def test_profiles_reach_the_engine_in_their_order(
    script: Path, drive: Path, tmp_path: Path
) -> None:
    from offload.config import make_config

    files = [tmp_path / "a.json", tmp_path / "b.json"]
    job = parse("--nvme", drive, "--profile", files[0], "--profile", files[1], script)
    assert make_config({}, job.environment).profile == tuple(files)


def test_the_engine_reads_what_the_command_sets(script: Path, drive: Path) -> None:
    from offload.config import make_config

    job = parse("--nvme", drive, "--host-memory", "2GiB", "--fresh", script)
    config = make_config({}, job.environment)
    assert config.nvme_path == (drive,)
    assert config.host_memory == 2 << 30
    assert config.resume is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nvm", "{drive}", "{script}"], "No such option"),
        (["--auto", "{script}"], "Missing option '--nvme'"),
        (["--nvme", "{drive}", "--auto", "--resume", "{script}"], "--resume: expected it without"),
        (["--nvme", "{drive}"], "Missing argument"),
        (["--nvme", "{drive}/none", "{script}"], "got nothing there. Create it first."),
        (["--nvme", "{script}", "{script}"], "expected a folder, got a file"),
        (["--nvme", "{drive}", "--profile", "a:b", "{script}"], "may not hold ':'"),
        (["--nvme", "{drive}", "{drive}/no.py"], "expected a Python file"),
        (["--config", "{drive}/no.json", "{script}"], "expected a DeepSpeed file"),
        (["--config", "{script}", "{script}"], "line 2, column 8: expected"),
        (["--nvme", "{drive}", "--host-memory", "2 parsecs", "{script}"], "'2 parsecs'"),
        (["--nvme", "{drive}", "--host-memory", "0", "{script}"], "positive"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    arguments: list[str], says: str, script: Path, drive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*(item.format(script=script, drive=drive) for item in arguments))
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert len(lines) == 1
    assert says in lines[0]
    assert not list(drive.iterdir())


def test_a_folder_that_may_not_be_written_is_refused(
    script: Path, drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # root may write anywhere, so the system's answer is replaced
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(SystemExit):
        parse("--nvme", drive, script)
    assert "got a read-only one" in capsys.readouterr().err


def test_a_second_sigterm_does_not_interrupt_the_end_that_the_first_began() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        shell.terminate_as_exception()
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(signal.SIGTERM)
        assert left.value.code == 143
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("given", "seen"), [(None, "passive"), ("active", "active")])
def test_threads_wait_passively_from_the_first_import_of_torch(
    given: str | None, seen: str, tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libgomp reads the policy when it is loaded; a setting of the user's stays."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    script = tmp_path / "tell.py"
    script.write_text(
        "import os, sys\n"
        "print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])\n"
        "import offload, torch\n"
        "print(offload.OffloadEngine.__name__)\n"
    )
    done = offload_train("--nvme", drive, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", seen, "OffloadEngine"]
