"""The plan's own account equals what the engine counts, byte for byte (DESIGN T3)."""

import models
import pytest
import torch

from offload import OffloadEngine

MODEL = {"width": 64, "num_blocks": 4, "num_heads": 2}
NUM_STEPS = 4
SMALL = {"host_memory": "240KiB", "chunk_elems": 4096}  # gradients go to disk


def trained(folder, model=models.Decoder, shape=MODEL, **settings) -> OffloadEngine:
    """An engine after some steps, each of one or more micro-steps."""
    defaults = {
        "nvme_path": folder, "dtype": "bfloat16", "compute_dtype": "float32", "resume": False,
        "host_memory": "64MiB", "placement": "disk", "param_persistence_threshold": 0,
        "overlap": "hold", "chunk_elems": 16384,
    }  # fmt: skip
    settings = defaults | settings
    engine = OffloadEngine(models.build(model, **shape), **settings)
    for index in range(NUM_STEPS * settings.get("gradient_accumulation_steps", 1)):
        engine.backward(engine(*models.batch(index)))
        engine.step()
    return engine


class Fp32Norms(models.Decoder):
    """Of 16 bits, but for its norms."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.bfloat16()
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.float()


HALF = {"dtype": "float16", "loss_scale": 64}
PLACEMENTS = {
    "everything on disk": {},
    "gradients spilled": SMALL,
    "everything in host memory": {"placement": "auto"},
    "some weights stay": {"placement": "auto", "host_memory": "700KiB", "chunk_elems": 4096},
    "weights and some state stay": {
        "placement": "auto", "host_memory": "2800KiB", "chunk_elems": 4096
    },
    "small tensors stay": {"param_persistence_threshold": 1000},
    "whole fp32 weights": {"dtype": "float32"},
    "whole fp32 weights, some stay": {
        "dtype": "float32", "placement": "auto", "host_memory": "2000KiB", "chunk_elems": 4096
    },
    "fp16 weights": HALF,
    "fp16 weights, some stay": {
        **HALF, "placement": "auto", "host_memory": "700KiB", "chunk_elems": 4096
    },
    "fp16 weights, gradients spilled": {**HALF, **SMALL, "host_memory": "260KiB"},
    "some weights are fp32": {"model": Fp32Norms},
    "fp16 weights, some are fp32 and small": {
        **HALF, "model": Fp32Norms, "param_persistence_threshold": 1000
    },
    "bf16 state": {"state_dtype": "bf16"},
    "8-bit state": {"state_dtype": "int8", "chunk_elems": 262144},
    "one state": {"optimizer": "lion"},
    "no state": {"optimizer": "sgd"},
    "one side": {"durability": "none"},
    "two micro-steps": {"gradient_accumulation_steps": 2},
    "two micro-steps, spilled": {"gradient_accumulation_steps": 2, **SMALL},
    "tied weights": {"shape": MODEL | {"tied": True}},
    "checkpointing": {"shape": MODEL | {"checkpointing": "nonreentrant"}},
    "weights used elsewhere": {"model": models.OutsideWeight, "shape": {}},
}  # fmt: skip


@pytest.mark.parametrize("settings", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_a_step_moves_what_the_plan_says(settings, tmp_path):
    engine = trained(tmp_path, **settings)
    plan, last = engine.plan, engine.metrics.last
    assert dict(plan.traffic.read) == last["read_bytes"]
    assert dict(plan.traffic.written) == last["write_bytes"]
    assert plan.space.total == engine._parts.ground.store.disk_bytes
    engine.close()


def test_the_placements_above_differ(tmp_path):
    """Else the test above would show less than its names say."""
    stays = {}
    for name in ("some weights stay", "weights and some state stay", "gradients spilled"):
        (tmp_path / name).mkdir()
        with trained(tmp_path / name, **PLACEMENTS[name]) as engine:
            stays[name] = {(unit.weights, unit.state, unit.gradients) for unit in engine.plan.units}
    weights = {name: {place[0] for place in places} for name, places in stays.items()}
    assert weights["some weights stay"] == {"host", "disk"}
    assert weights["weights and some state stay"] == {"host"}
    assert len({place[1] for place in stays["weights and some state stay"]}) > 1
    assert {place[2] for place in stays["gradients spilled"]} == {"host", "disk"}


def test_updates_ahead_write_the_same_and_read_less_by_no_more_than_what_is_lent(tmp_path):
    engine = trained(tmp_path, overlap="speculate")
    plan, last = engine.plan, engine.metrics.last
    assert dict(plan.traffic.written) == last["write_bytes"]
    saved = sum(plan.traffic.read.values()) - last["read_total"]
    assert 0 < saved <= plan.traffic.lent
    assert all(
        plan.traffic.read[name] == size
        for name, size in last["read_bytes"].items()
        if name != "update.param"
    )
    engine.close()


def test_the_plan_before_a_step_is_the_plan_after_it_where_the_model_runs_in_order(tmp_path):
    first = OffloadEngine(
        models.build(models.Decoder, **MODEL), nvme_path=tmp_path, resume=False
    )  # fmt: skip
    before = first.plan
    for index in range(3):
        first.backward(first(*models.batch(index)))
        first.step()
    assert first.plan.traffic == before.traffic
    assert first.plan.units == before.units
    assert "compute" not in before.terms
    assert first.plan.terms["compute"] == first.metrics.last["bound"]["terms"]["compute"]
    first.close()


def test_the_plan_can_be_printed(tmp_path):
    with trained(tmp_path, **SMALL) as engine:
        text = str(engine.plan)
        assert "blocks.0 ... blocks.3" in text
        assert "backward.grad" in text
        assert "bound" in text
