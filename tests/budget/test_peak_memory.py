"""Peak memory is bounded by the budgets, whatever the model's size (DESIGN M1)."""

from pathlib import Path

import pytest
from memory import measure

MIB = 1 << 20
# A block has 2.4 M parameters: 9.6 MB in fp32.  Four blocks just fill both budgets: their gradients
# are held, those of the other twelve are not.
WIDTH = 448
HOST, DEVICE = 22 * MIB, 24 * MIB
OVERHEAD = 150 * 10**6  # the stated constant
SETTINGS = {
    "model": {"width": WIDTH, "num_heads": 4},
    "batch": 1,
    "seq": 16,
    "num_steps": 2,
    "engine": {
        "host_memory": HOST,
        "placement": "disk",  # what stays would differ between small and large models
        "device_memory": DEVICE,
        "param_persistence_threshold": 0,
        "dtype": "bfloat16",
        "compute_dtype": "float32",
    },
}


def peaks(num_blocks: int, folder: Path, num_runs: int) -> tuple[int, int, dict]:
    """Bytes of the offloaded run, of the activations, and the run's report."""
    own = {**SETTINGS, "num_blocks": num_blocks, "folder": str(folder)}
    # A sampler on a busy machine misses peaks, and never sees too much: the largest is nearest.
    offloaded = max((measure(own) for _ in range(num_runs)), key=lambda run: run.peak)
    bare = [measure({**own, "engine": None}) for _ in range(num_runs)]
    return offloaded.peak, max(run.peak - run.built for run in bare), offloaded.report


def spilled_bytes(report: dict) -> int:
    return sum(size for key, size in report["write_bytes"].items() if key.endswith(".grad"))


@pytest.mark.parametrize(
    ("num_runs", "tolerance"), [(1, 0.2), pytest.param(3, 0.05, marks=pytest.mark.slow)]
)
def test_a_model_four_times_larger_has_the_same_peak(num_runs, tolerance, tmp_path):
    """One run each sees a model that stays in memory; the promised 5 % needs several."""
    small, small_activations, small_report = peaks(4, tmp_path, num_runs)
    large, large_activations, large_report = peaks(16, tmp_path, num_runs)
    assert large_report["num_params"] > 3.9 * small_report["num_params"]
    assert 12 * large_report["num_params"] > 5 * (HOST + DEVICE)
    assert spilled_bytes(large_report) > 0, "the larger model's gradients must not fit"
    assert spilled_bytes(small_report) == 0
    for peak, activations in ((small, small_activations), (large, large_activations)):
        assert peak <= HOST + DEVICE + activations + OVERHEAD
    assert large - large_activations == pytest.approx(small - small_activations, rel=tolerance)
