"""Measure a child process's memory from outside: anonymous and shared bytes, sampled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAMPLE_S = 0.001
# Large tensors in mappings of their own: the C heap then holds no free megabytes, whose number
# would depend on the order of the allocations and blur a comparison within a few per cent.
CALM_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


@dataclass(frozen=True)
class Measured:
    """Bytes over the baseline that the child had after one step of a one-block model."""

    built: int  # when the model (and its engine) stood, before the first step
    peak: int  # the most while the steps ran
    report: dict[str, Any]


def held_bytes(pid: int) -> int:
    """RssAnon + RssShmem: what the kernel cannot drop.  0 after the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    words = [line.split() for line in status.splitlines()]
    return 1024 * sum(int(w[1]) for w in words if w[0] in ("RssAnon:", "RssShmem:"))


class Sampler(threading.Thread):
    """Keeps the largest sample of one process until told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.num_samples = pid, 0, 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self.peak = max(self.peak, held_bytes(self.pid))
            self.num_samples += 1


def measure(settings: dict[str, Any]) -> Measured:
    """Run child.py and watch it; raises CalledProcessError with the child's own words."""
    path = os.pathsep.join([str(ROOT), str(HERE.parent)])
    child = subprocess.Popen(
        [sys.executable, str(HERE / "child.py"), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, **CALM_HEAP},
        text=True,
    )
    with child:
        marks = {}
        for word in ("warm", "built"):
            line = child.stdout.readline().strip()
            assert line == word, f"the child said {line!r} for {word!r}"
            marks[word] = held_bytes(child.pid)
            if word == "built":
                sampler = Sampler(child.pid)
                sampler.start()
            child.stdin.write("go\n")
            child.stdin.flush()
        report = json.loads(child.stdout.readline())
        sampler.ended.set()
        sampler.join()
    assert child.returncode == 0
    assert sampler.num_samples > 10, "too few samples to speak of a peak"
    return Measured(marks["built"] - marks["warm"], sampler.peak - marks["warm"], report)
