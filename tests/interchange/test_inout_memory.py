"""Models several times larger than the budgets come in and go out within them (DESIGN M1, M3)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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


def start_child(settings: dict, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(HERE / "inout_child.py"), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))},
        text=True,
        **options,
    )


def phases(child: subprocess.Popen) -> Iterator[str]:
    """Each phase as it begins; the child goes on when the next one is asked for."""
    while (line := child.stdout.readline().strip()) != "end":
        assert line, "the child ended early"
        yield line
        child.stdin.write("go\n")
        child.stdin.flush()


def measure(settings: dict) -> tuple[dict[str, int], int]:
    """Peak bytes over the baseline in each phase, and the number of parameters."""
    peaks: dict[str, int] = {}
    with start_child(settings) as child:
        sampler = Sampler(child.pid)
        baseline = phase = None
        for begun in phases(child):
            if phase is None:
                baseline = held_bytes(child.pid)
                sampler.start()
            else:
                peaks[phase] = sampler.peak - baseline
            phase, sampler.peak = begun, 0
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
    return measure({**SETTINGS, "folder": str(tmp_path_factory.mktemp("inout"))})


@pytest.mark.parametrize(
    "phase", ["construct", "take over", "export", "export to one file", "load"]
)
def test_a_phase_stays_within_the_budgets(phase, measured):
    peaks, num_params = measured
    assert 4 * num_params > 4 * (HOST + DEVICE), "the weights must not fit"
    assert 0 < peaks[phase] <= HOST + DEVICE + OVERHEAD


@pytest.mark.slow
def test_a_zero_checkpoint_larger_than_the_budgets_is_read_within_them(tmp_path):
    settings = {**SETTINGS, "num_blocks": 14, "folder": str(tmp_path), "run": "deepspeed"}
    peaks, num_params = measure(settings)
    assert 12 * num_params > 4 * (HOST + DEVICE), "the state must not fit"
    assert 0 < peaks["load deepspeed"] <= HOST + DEVICE + OVERHEAD


@pytest.mark.slow
@pytest.mark.root
def test_everything_works_where_page_cache_counts_too(tmp_path):
    """A hard limit of 400 MB on all memory of the process; the weights alone are 480 MB."""
    group = Path("/sys/fs/cgroup/memory") / f"offload-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("only root may limit memory, where cgroup v1 has a memory controller")
    try:
        (group / "memory.limit_in_bytes").write_text(str(400 * MIB))

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        settings = {**SETTINGS, "num_blocks": 60, "folder": str(tmp_path)}
        with start_child(settings, preexec_fn=enter) as child:
            seen = list(phases(child))
            child.stdin.write("go\n")
            child.stdin.flush()
            report = json.loads(child.stdout.readline())
        assert child.returncode == 0
        assert 4 * report["num_params"] > 400 * MIB
        assert seen == ["construct", "take over", "export", "export to one file", "load"]
        assert int((group / "memory.max_usage_in_bytes").read_text()) > 390 * MIB, "it pressed"
    finally:
        group.rmdir()
