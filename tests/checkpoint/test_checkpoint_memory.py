"""Saving and loading stream: their memory does not depend on the model (DESIGN M1)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

MIB = 1 << 20
COPY_BYTES = 32 * MIB  # pieces in flight
SLACK = 16 * MIB  # threads, manifests, the allocator
STATE_BYTES = 12  # per parameter


def held_bytes(pid: int) -> int:
    """RssAnon + RssShmem: what the kernel cannot drop."""
    status = Path(f"/proc/{pid}/status").read_text()
    words = [line.split() for line in status.splitlines()]
    return 1024 * sum(int(word[1]) for word in words if word[0] in ("RssAnon:", "RssShmem:"))


def test_saving_to_another_drive_and_loading_need_no_more_than_their_pieces(
    tmp_path: Path, other_drive: Path
) -> None:
    if os.statvfs(other_drive).f_bavail * os.statvfs(other_drive).f_frsize < 1 << 29:
        pytest.skip("needs 512 MiB on a second file system")
    paths = [str(Path(__file__).parents[1]), *sys.path]
    command = [sys.executable, str(Path(__file__).parent / "checkpoint_child.py")]
    (tmp_path / "store").mkdir()
    child = subprocess.Popen(
        [*command, str(tmp_path / "store"), str(other_drive)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        state_bytes = int(child.stdout.readline()) * STATE_BYTES
        trained = held_bytes(child.pid)
        samples: list[int] = []
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(0.001):
                samples.append(held_bytes(child.pid))

        sampler = threading.Thread(target=sample)
        sampler.start()
        child.stdin.write("go\n")
        child.stdin.flush()
        word = child.stdout.readline()
        ended.set()
        sampler.join()
        child.stdin.write("go\n")
        child.stdin.flush()
    assert (word, child.returncode) == ("loaded\n", 0)
    assert len(samples) > 50
    assert state_bytes > 3 * (COPY_BYTES + SLACK), "a copy in memory would pass unseen"
    assert max(samples) - trained <= COPY_BYTES + SLACK
