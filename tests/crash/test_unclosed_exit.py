"""A script that ends without `close()`: the interpreter's exit finishes the last step.

The engine is a global of the script, as scripts have it, so it lives until the finalizers run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch
from offload import OffloadEngine

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
engine = OffloadEngine(
    model, nvme_path=sys.argv[1], overlap=sys.argv[2], durability=sys.argv[3], device="cpu",
    compute_dtype=torch.float32, host_memory="32MiB", device_memory="16MiB",
)
for _ in range(3):
    engine.backward(engine(torch.randn(4, 256)).pow(2).mean())
    engine.step()
"""
ENDINGS = {
    "": 0,
    "sys.exit(3)": 3,
    "raise ValueError('a mistake')": 1,
    "os.fork() or sys.exit(5)\nassert os.waitstatus_to_exitcode(os.wait()[1]) == 5": 0,
}


def committed(drive: Path) -> int:
    from offload.store.inspect import find_stores

    (found,) = find_stores([drive])
    assert found.record is not None
    assert not found.problems
    return found.record.generation


@pytest.mark.parametrize(
    ("overlap", "durability", "ending"),
    [
        ("hold", "process", ""),
        ("speculate", "process", "sys.exit(3)"),
        ("speculate", "step", "raise ValueError('a mistake')"),
        ("auto", "process", list(ENDINGS)[3]),
    ],
    ids=["end", "exit", "exception", "fork"],
)
def test_the_last_step_is_committed_when_nobody_closes_the_engine(
    overlap: str, durability: str, ending: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + ending, str(tmp_path), overlap, durability],
        # Freed memory is overwritten: whoever uses it is found out.
        env={**os.environ, "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == ENDINGS[ending], ended.stderr
    assert committed(tmp_path) == 3
