"""Models several times larger than the budgets come in and go out within them (DESIGN M1, M3)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "budget"))

from memory import Sampler, held_bytes  # noqa: E402

MIB = 1 << 20
HOST, DEVICE = 22 * MIB, 24 * MIB
NUM_BLOCKS = 26
SETTINGS = {
    "num_blocks": NUM_BLOCKS,
    "engine": {
        "host_memory": HOST,
        "device_memory": DEVICE,
        "param_persistence_threshold": 0,
        "dtype": "float32",
    },
}
OVERHEAD = 32 * MIB  # of an export: its pieces in flight


def measure(folder: Path) -> tuple[dict[str, int], int]:
    """Peak bytes over the baseline in each phase, and the number of parameters."""
    child = subprocess.Popen(
        [
            sys.executable,
            str(HERE / "inout_child.py"),
            json.dumps({**SETTINGS, "folder": str(folder)}),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))},
        text=True,
    )
    peaks: dict[str, int] = {}
    with child:
        sampler = Sampler(child.pid)
        baseline = phase = None
        while (line := child.stdout.readline().strip()) != "end":
            assert line, "the child ended early"
            if phase is not None:
                peaks[phase] = sampler.peak - baseline
            else:
                baseline = held_bytes(child.pid)
                sampler.start()
            phase, sampler.peak = line, 0
            child.stdin.write("go\n")
            child.stdin.flush()
        peaks[phase] = sampler.peak - baseline
        child.stdin.write("go\n")
        child.stdin.flush()
        report = json.loads(child.stdout.readline())
        sampler.ended.set()
        sampler.join()
    assert child.returncode == 0
    assert sampler.num_samples > 200, "too few samples to speak of peaks"
    return peaks, report["num_params"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return measure(tmp_path_factory.mktemp("inout"))


@pytest.mark.parametrize(
    "phase", ["construct", "take over", "export", "export to one file", "load"]
)
def test_a_phase_stays_within_the_budgets(phase, measured):
    peaks, num_params = measured
    assert 4 * num_params > 4 * (HOST + DEVICE), "the weights must not fit"
    assert 0 < peaks[phase] <= HOST + DEVICE + OVERHEAD
