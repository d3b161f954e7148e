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
    count = settings.get("gradient_accumulation_steps", 1)
    for index in range(0, NUM_STEPS * count, count):
        engine.train_batch([models.batch(index + i) for i in range(count)])
    return engine


class Fp32Norms(models.Decoder):
    """Of 16 bits, but for its norms."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.bfloat16()
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.float()


class PartlyFrozen(models.Decoder):
    """Half of each block is frozen, and one block whole."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.norm_1.requires_grad_(False)
            block.qkv.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


HALF = {"dtype": "float16", "loss_scale": 64}
PLACEMENTS = {
    "everything on disk": {},
    "gradients spilled": SMALL,
    "everything in host memory": {"placement": "auto"},
    "some weights stay": {"placement": "auto", "host_memory": "700KiB", "chunk_elems": 4096},
    "weights and some state stay": {
        "placement": "auto", "host_memory": "2800KiB", "chunk_elems": 4096
    },
    "weights on the device": {"placement": {"weights": "device", "state": "disk"}, **SMALL},
    "weights on the device, two micro-steps": {
        "placement": {"weights": "device", "state": "disk"}, **SMALL,
        "gradient_accumulation_steps": 2,
    },
    "whole fp32 weights on the device": {
        "dtype": "float32", "placement": {"weights": "device", "state": "disk"}, **SMALL,
        "host_memory": "270KiB",
    },
    "some weights on the device": {
        "placement": {"weights": "auto", "state": "disk"}, "device_memory": "900KB", **SMALL
    },
    "state on the device": {"placement": {"weights": "disk", "state": "device"}, **SMALL},
    "everything on the device": {"placement": "device"},
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
    "layer-major": {"gradient_accumulation_steps": 3, "order": "layer"},
    "layer-major, spilled": {"gradient_accumulation_steps": 3, "order": "layer", **SMALL},
    "layer-major, some weights stay": {
        "gradient_accumulation_steps": 3, "order": "layer", "placement": "auto",
        "host_memory": "900KiB", "chunk_elems": 4096,
    },
    "tied weights": {"shape": MODEL | {"tied": True}},
    "checkpointing": {"shape": MODEL | {"checkpointing": "nonreentrant"}},
    "frozen parts": {"model": PartlyFrozen},
    "frozen parts, recomputed": {
        "model": PartlyFrozen, "shape": MODEL | {"checkpointing": "nonreentrant"}
    },
    "frozen parts, little room": {"model": PartlyFrozen, "device_memory": "800KB"},
    "blocks used twice": {"model": models.RepeatedBlock, "device_memory": "800KB"},
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
    assert weights["some weights stay"] - {"device"} == {"host", "disk"}
    assert weights["weights and some state stay"] - {"device"} == {"host"}
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
    assert before.times is None
    assert first.plan.terms["compute"] == first.metrics.last["bound"]["terms"]["compute"]
    first.close()


def test_after_a_step_the_plan_tells_when_every_byte_must_move(tmp_path):
    with OffloadEngine(
        models.build(models.Decoder, **MODEL), nvme_path=tmp_path, placement="disk", resume=False,
        param_persistence_threshold=0,
    ) as engine:  # fmt: skip
        for index in range(3):
            engine.backward(engine(*models.batch(index)))
            engine.step()
        # A small model's traffic tells nothing of the drive, so its rates are told here.
        rates = {"read": 1e9, "write": 1e9, "mixed": 1.5e9}
        engine.metrics.last["bound"]["rates"] = rates
        plan = engine.plan
        assert plan.times is not None
        assert sum(each.num_bytes for each in plan.times.transfers) == plan.traffic.total
        seconds, stalls = engine.metrics.last["seconds"], engine.metrics.last["stalls"]
        phases = ("forward", "backward", "step", "outside")
        alone = sum(seconds[phase] for phase in phases) - sum(
            spent for cause, spent in stalls.items() if cause.partition(".")[0] in phases
        )
        assert plan.times.step_s - plan.times.stall_s == pytest.approx(alone)
        assert "slots that keep to them" in str(plan)


def test_the_plan_knows_the_order_before_a_step_and_follows_the_one_that_is_used(tmp_path):
    count = 2
    settings = {"gradient_accumulation_steps": count, "order": "layer"}
    with OffloadEngine(
        models.build(models.Decoder, **MODEL), nvme_path=tmp_path, placement="disk",
        param_persistence_threshold=0, resume=False, **settings,
    ) as engine:  # fmt: skip
        told = engine.plan
        assert "2 micro-steps unit by unit (layer-major)" in str(told)
        for step in range(3):
            engine.train_batch([models.batch(count * step + i) for i in range(count)])
        assert engine.plan.traffic == told.traffic
        for step in range(3):
            batches = [models.batch(count * step + i) for i in range(count)]
            engine.train_batch(batches, order="horizontal")
        other = engine.plan
        assert "2 micro-steps one after another" in str(other)
        forward = "forward.param"
        assert other.traffic.read[forward] == count * told.traffic.read[forward]


class Mixed(models.Decoder):
    """With a buffer, an integer parameter and frozen embeddings."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.register_buffer("scale", torch.ones(3))
        self.counts = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.embed.weight.requires_grad_(False)


def test_what_is_not_offloaded_is_told_with_its_reason(tmp_path):
    with trained(tmp_path, model=Mixed, param_persistence_threshold=1000) as engine:
        told = "\n".join(engine.plan.left_out)
        assert "counts: torch.int64 is none of float32" in told
        assert "1 buffers (12 bytes, such as scale)" in told
        assert "small tensors" in told
        assert "below param_persistence_threshold, 1,000 elements" in told
        assert "1 frozen tensors" in told
        for line in engine.plan.left_out:
            assert line in str(engine.plan)
            assert line in engine.describe()


def test_the_plan_can_be_printed(tmp_path):
    with trained(tmp_path, **SMALL) as engine:
        text = str(engine.plan)
        assert "blocks.0 ... blocks.3" in text
        assert "backward.grad" in text
        assert "bound" in text
