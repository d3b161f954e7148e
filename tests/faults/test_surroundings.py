"""Without io_uring, kernel AIO, lockable memory or a drive, training works and says what it does
with; on what cannot be written it is refused in one line."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from surroundings import CASES, read_only_mount

HERE = Path(__file__).resolve().parent
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="system calls are not numbered here"
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not pytest's own: every start of pytest shuts that to other users."""
    made = Path(tempfile.mkdtemp(prefix="offload-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def answers(folder: Path) -> Iterator[dict[str, Any]]:
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, str(HERE / "surroundings.py"), str(folder)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    subprocess.run(["umount", str(folder / read_only_mount.__name__)], capture_output=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    yield found
    shutil.rmtree(found["in_memory"]["path"], ignore_errors=True)


def has(lines: list[str], *words: str) -> int:
    return sum(all(word in line for word in words) for line in lines)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_the_numbers_are_those_of_plain_surroundings(answers: dict[str, Any], case: str) -> None:
    assert answers[case]["error"] is None
    assert len(answers["plain"]["losses"]) == 2
    assert answers[case]["losses"] == answers["plain"]["losses"]


@pytest.mark.parametrize("case", ["plain", "relative_path", "odd_name"])
def test_where_nothing_lacks_nothing_is_said(answers: dict[str, Any], case: str) -> None:
    assert answers[case]["said"] == []
    assert not has(answers[case]["notes"], "io_uring")


def test_without_io_uring_kernel_aio_is_used_and_told_once(answers: dict[str, Any]) -> None:
    found = answers["no_uring"]
    assert has(found["said"], "io_uring is not available", "using libaio") == 1
    assert has(found["notes"], "no io_uring: libaio") == 1


def test_without_either_threads_are_used_and_told_once(answers: dict[str, Any]) -> None:
    found = answers["neither_ring_nor_kernel_aio"]
    assert has(found["said"], "io_uring is not available", "using threads") == 1
    assert has(found["notes"], "no io_uring: threads") == 1


@root
def test_an_ordinary_user_who_may_lock_nothing_trains_and_is_told_once(
    answers: dict[str, Any],
) -> None:
    found = answers["ordinary_user_who_may_lock_nothing"]
    assert found["error"] is None
    assert found["losses"] == answers["plain"]["losses"]
    assert has(found["said"], "could not be registered", "ulimit -l") == 1
    assert has(found["notes"], "cannot be registered", "ulimit -l") == 1


def test_a_folder_in_memory_works_and_is_told(answers: dict[str, Any]) -> None:
    assert has(answers["in_memory"]["notes"], "tmpfs: this is memory, not a drive") == 1


@root
def test_a_read_only_mount_is_refused_in_one_line_that_names_it(answers: dict[str, Any]) -> None:
    found = answers["read_only_mount"]
    assert found["error"].startswith("StoreError: ")
    assert "Read-only file system" in found["error"]
    assert found["path"] in found["error"]
    assert "\n" not in found["error"]
