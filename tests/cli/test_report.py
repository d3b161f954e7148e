"""offload report: what would be used here, told by what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aio
from offload import kernels
from offload.cli import machine, main, shell


def test_the_report_names_backend_variant_and_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.parse(main.command, ["report", str(tmp_path)])
    lines = [line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    found = {name: value.strip() for name, value in lines}
    probe = aio.probe(tmp_path)
    assert found["backend"] == probe.backend
    assert found["folder"].startswith(str(tmp_path))
    assert found["kernel variant"].startswith(kernels.variant())
    assert found["torch"] == torch.__version__
    assert {"uring", "libaio", "threads"} <= set(found)
    assert not list(tmp_path.iterdir())


def test_the_file_system_is_that_of_the_nearest_mount_point() -> None:
    assert machine.file_system(Path("/proc/self")) == "proc"
    assert machine.file_system(Path("/proc/self/fd")) == "proc"
    assert machine.file_system(Path("/")) != "proc"


def test_a_backend_that_does_not_work_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = aio.probe(tmp_path)
    backends: dict[str, str | None] = {**real.backends, "uring": "EPERM: Operation not permitted"}
    broken = aio.Probe(**{**vars(real), "backends": backends, "registration": "ENOMEM"})
    monkeypatch.setattr(aio, "probe", lambda path: broken)
    found = dict(machine.storage_lines(tmp_path))
    assert found["  uring"] == "not available: EPERM: Operation not permitted"
    assert found["backend"] != "uring"
    assert found["  registered"] == "no: ENOMEM"
