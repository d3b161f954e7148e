"""From the least host budget to everything: reads fall to 0, writes are as durability says.

Every byte of it as planned (DESIGN M4, T3).
"""

import models
import pytest

from offload import OffloadEngine
from offload.errors import BudgetError

MODEL = {"width": 64, "num_blocks": 4, "num_heads": 2}
CHUNK_ELEMS = 4096
NUM_STEPS = 3
NUM_BUDGETS = 8


def engine_with(folder, host_memory: int, **settings) -> OffloadEngine:
    defaults = {
        "dtype": "bfloat16", "compute_dtype": "float32", "resume": False, "overlap": "hold",
        "chunk_elems": CHUNK_ELEMS, "param_persistence_threshold": 1000,
    }  # fmt: skip
    model = models.build(models.Decoder, **MODEL)
    return OffloadEngine(model, nvme_path=folder, host_memory=host_memory, **(defaults | settings))


def least_and_most(folder, **settings) -> tuple[int, int]:
    """The least budget that works, and what everything takes."""
    with pytest.raises(BudgetError) as told:
        engine_with(folder, 1, **settings)
    least = int(str(told.value).rpartition("host_memory=")[2].split()[0])
    with engine_with(folder, 1 << 30, **settings) as engine:
        return least, engine.plan.placement.total_bytes


def moved_in_a_step(folder, host_memory: int, **settings) -> tuple[float, float]:
    """Bytes read and written per parameter, both as the plan says them to the byte."""
    with engine_with(folder, host_memory, **settings) as engine:
        for step in range(NUM_STEPS):
            engine.backward(engine(*models.batch(step)))
            engine.step()
        plan, last = engine.plan, engine.metrics.last
        assert dict(plan.traffic.read) == last["read_bytes"]
        assert dict(plan.traffic.written) == last["write_bytes"]
        totals = (last["read_total"], last["write_total"])
        return totals[0] / plan.num_params, totals[1] / plan.num_params


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("durability", ["process", "none"])
def test_reads_fall_to_nothing_as_the_budget_grows(durability, dtype, tmp_path):
    settings = {"durability": durability, "dtype": dtype}
    least, most = least_and_most(tmp_path, **settings)
    budgets = [least + (most - least) * index // (NUM_BUDGETS - 1) for index in range(NUM_BUDGETS)]
    moved = [moved_in_a_step(tmp_path, budget, **settings) for budget in budgets]
    reads, writes = (list(column) for column in zip(*moved, strict=True))
    assert reads == sorted(reads, reverse=True)
    assert writes == sorted(writes, reverse=True)
    assert reads[0] > 4 + reads_of_update(dtype)  # spilled gradients come on top
    assert reads[-1] == 0
    assert writes[0] > 12.1
    assert writes[-1] == (0 if durability == "none" else pytest.approx(12, rel=0.02))


def reads_of_update(dtype: str) -> float:
    """Of a parameter, with nothing in memory; whole fp32 weights are fetched twice as wide."""
    return 12 if dtype == "bfloat16" else 16
