"""Bytes moved per parameter and step: the table of DESIGN T3, by our counters and the kernel's."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import models
import pytest

from offload import OffloadEngine

MODEL = {"width": 256, "num_blocks": 5, "num_heads": 2}
NUM_PARAMS = sum(p.numel() for p in models.build(models.Decoder, **MODEL).parameters())
NUM_TURN_AROUND = 768 + 61 * 256  # what is last in forward and first in backward: norm, head
PADDING = 1.005  # extents are whole 4096-byte blocks


@dataclass(frozen=True)
class Traffic:
    """Bytes by role and phase, as the engine and as the kernel counted them."""

    read: Counter[str]
    write: Counter[str]
    kernel_read: int
    kernel_write: int

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read - other.read,
            self.write - other.write,
            self.kernel_read - other.kernel_read,
            self.kernel_write - other.kernel_write,
        )


def kernel_bytes() -> tuple[int, int]:
    """What this process made the block layer read and write."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


@pytest.fixture
def folder(tmp_path):
    """A folder whose traffic the kernel counts: a disk, not memory."""
    before = kernel_bytes()[1]
    path = tmp_path / "probe"
    with path.open("wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    path.unlink()
    if kernel_bytes()[1] - before < 1 << 20:
        pytest.skip(f"{tmp_path} is not on a disk whose traffic the kernel counts")
    return tmp_path


def run(folder: Path, num_steps: int, **settings) -> Traffic:
    """Train, close (so that nothing is under way) and tell what moved."""
    before = kernel_bytes()
    defaults = {
        "nvme_path": folder,
        "dtype": "bfloat16",
        "compute_dtype": "float32",
        "host_memory": "128MiB",
        "placement": "disk",
        "device_memory": "16MiB",
        "param_persistence_threshold": 0,
        "overlap": "hold",
        "resume": False,
    }
    settings = defaults | settings
    engine = OffloadEngine(models.build(models.Decoder, **MODEL), **settings)
    for index in range(num_steps * settings.get("gradient_accumulation_steps", 1)):
        engine.backward(engine(*models.batch(index)))
        engine.step()
    engine.close()
    after = kernel_bytes()
    counted = engine.metrics
    return Traffic(
        Counter(counted.read_bytes),
        Counter(counted.write_bytes),
        after[0] - before[0],
        after[1] - before[1],
    )


def two_steps(folder: Path, **settings) -> Traffic:
    """Two steps of a run under way: four steps less the first two."""
    return run(folder, 4, **settings) - run(folder, 2, **settings)


def per_param(counts: Counter[str]) -> dict[str, float]:
    return {key: size / NUM_PARAMS / 2 for key, size in counts.items()}


def matches(counts: dict[str, float], table: dict[str, float]) -> None:
    """Never above the table, and below it by no more than the turn-around saves."""
    saved = 2 * NUM_TURN_AROUND / NUM_PARAMS
    assert counts.keys() == table.keys()
    for key, size in counts.items():
        least = table[key] - (saved if key == "backward.param" else 0)
        assert least <= size <= table[key] * PADDING, key


STATE = {"update.param": 2, "update.master_lo": 2, "update.exp_avg": 4, "update.exp_avg_sq": 4}


def test_a_held_step_moves_twenty_eight_bytes_a_parameter(folder):
    traffic = two_steps(folder)
    matches(per_param(traffic.read), {"forward.param": 2, "backward.param": 2, **STATE})
    matches(per_param(traffic.write), STATE)
    total = sum(per_param(traffic.read + traffic.write).values())
    assert 27.5 < total <= 28 * PADDING


def test_speculating_never_moves_more_when_nothing_is_clipped(folder):
    held, ahead = run(folder, 3), run(folder, 3, overlap="speculate")
    assert ahead.write == held.write
    assert sum(ahead.read.values()) <= sum(held.read.values())


def test_redoing_a_step_costs_its_state_once_more(folder):
    held = run(folder, 3)
    redone = run(folder, 3, overlap="speculate", gradient_clipping=1e-3)
    for role in STATE:
        assert held.write[role] <= redone.write[role] <= 2 * held.write[role]
    assert redone.read["forward.param"] == held.read["forward.param"]


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
def test_the_kernel_counts_what_we_count(overlap, folder):
    traffic = two_steps(folder, overlap=overlap)
    assert traffic.kernel_read == pytest.approx(sum(traffic.read.values()), rel=0.01)
    assert traffic.kernel_write == pytest.approx(sum(traffic.write.values()), rel=0.01)


def test_gradients_that_do_not_fit_move_twice(folder):
    traffic = two_steps(folder, host_memory="4MiB", chunk_elems=16384)
    spill = {"backward.grad": 2}
    reads, writes = per_param(traffic.read), per_param(traffic.write)
    assert 0 < writes["backward.grad"] <= 2 * PADDING
    assert reads["update.grad"] == pytest.approx(writes["backward.grad"])
    del reads["update.grad"]
    matches(reads, {"forward.param": 2, "backward.param": 2, **STATE})
    assert writes.keys() == STATE.keys() | spill.keys()


def test_a_further_micro_step_reads_the_weights_again_and_nothing_else(folder):
    traffic = two_steps(folder, gradient_accumulation_steps=2)
    reads = per_param(traffic.read)
    saved = 2 * NUM_TURN_AROUND / NUM_PARAMS
    assert reads["forward.param"] == pytest.approx(4, rel=0.01)
    assert 2 * (2 - saved) <= reads["backward.param"] <= 4 * PADDING
    matches(per_param(traffic.write), STATE)


def test_whole_weights_move_eight_bytes_more(folder):
    traffic = two_steps(folder, dtype="float32")
    reads = per_param(traffic.read)
    assert reads["forward.param"] + reads["forward.master_lo"] == pytest.approx(4, rel=0.01)
    matches(per_param(traffic.write), STATE)


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
def test_fp16_weights_beside_whole_masters_move_thirty_bytes_a_parameter(overlap, folder):
    traffic = two_steps(folder, dtype="float16", loss_scale=1024, overlap=overlap)
    state = {"update.master": 4, "update.exp_avg": 4, "update.exp_avg_sq": 4}
    matches(per_param(traffic.read), {"forward.param": 2, "backward.param": 2, **state})
    matches(per_param(traffic.write), {"update.param": 2, **state})
    total = sum(per_param(traffic.read + traffic.write).values())
    assert 29.5 < total <= 30 * PADDING
    assert traffic.kernel_read == pytest.approx(sum(traffic.read.values()), rel=0.01)
    assert traffic.kernel_write == pytest.approx(sum(traffic.write.values()), rel=0.01)


def test_moments_that_are_zero_are_not_read(folder):
    first = run(folder, 1)
    assert first.read["update.exp_avg"] == first.read["update.exp_avg_sq"] == 0
    second = run(folder, 2)
    assert second.read["update.exp_avg"] / NUM_PARAMS == pytest.approx(4, rel=0.01)


def test_tensors_kept_on_the_device_are_not_read(folder):
    traffic = two_steps(folder, param_persistence_threshold=10**9, device_memory="64MiB")
    assert not +traffic.read


def test_bf16_state_moves_eighteen_bytes_a_parameter_and_two_when_held(folder):
    traffic = two_steps(folder, state_dtype="bf16")
    state = dict.fromkeys(STATE, 2)
    matches(per_param(traffic.write), state)
    reads = per_param(traffic.read)
    assert {key: reads[key] for key in STATE if key != "update.param"} == pytest.approx(
        {key: 2 for key in STATE if key != "update.param"}, rel=0.005
    )
    total = sum(per_param(traffic.read + traffic.write).values())
    assert 19.5 < total <= 20 * PADDING  # held: the weights are read once more


def test_int8_state_moves_fourteen_bytes_a_packed_parameter_and_two_when_held(folder):
    """Vectors and the embedding keep four bytes; the last unit's weights turn around."""
    shapes = dict(models.build(models.Decoder, **MODEL).named_parameters())
    plain = sum(p.numel() for name, p in shapes.items() if p.dim() < 2 or "embed" in name)
    packed = NUM_PARAMS - plain
    traffic = two_steps(folder, state_dtype="int8", host_memory="96MiB")
    writes = per_param(traffic.write)
    moment, scale = (packed + 4 * plain) / NUM_PARAMS, packed / 64 / NUM_PARAMS
    table = {"update.param": 2, "update.master_lo": 2}
    table |= {f"update.{name}": moment for name in ("exp_avg", "exp_avg_sq")}
    table |= {f"update.{name}_scale": scale for name in ("exp_avg", "exp_avg_sq")}
    assert writes.keys() == table.keys()
    for key, size in writes.items():
        pages = 7 * 4096 / NUM_PARAMS if key.endswith("scale") else 0  # of each unit's last
        assert table[key] <= size <= table[key] * 1.01 + pages, key
    total = sum(per_param(traffic.read + traffic.write).values())
    held = 2
    assert total <= held + (14.2 * packed + 26 * plain) / NUM_PARAMS * 1.01
    assert traffic.kernel_write == pytest.approx(sum(traffic.write.values()), rel=0.02)
