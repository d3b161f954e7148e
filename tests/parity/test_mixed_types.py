"""Models of 16 bits with parts that stay fp32: those move whole and compute in fp32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from case import (
    BF16,
    FP16,
    FP32,
    Case,
    Trained,
    assert_learned,
    assert_same,
    collect_engine,
    engine_step,
    same_bits,
    train_in_memory,
    train_offloaded,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from offload import OffloadEngine


class Norm(nn.LayerNorm):
    """In fp32, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Router(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Mixed(models.Decoder):
    """A decoder with fp32 norms and a large fp32 router in each block."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        width = self.embed.embedding_dim
        for block in self.blocks:
            block.norm_1, block.norm_2 = Norm(width), Norm(width)
            block.down = nn.Sequential(nn.Linear(3 * width, width), Router(width, width))
        self.norm = Norm(width)


SMALL = Case(kind=Mixed, fp32=("norm",), clipping=0.5)  # persistent ones alone
CASE = dataclasses.replace(SMALL, fp32=("norm", "down.1"))
ROUTER, BIAS, UP = "blocks.1.down.1.weight", "blocks.1.up.bias", "blocks.1.up.weight"
THRESHOLD = 150  # norms and most biases are smaller, routers and matrices larger
LOSS_SCALE = (("initial_scale_power", 10), ("hysteresis", 1))


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("threshold", [0, THRESHOLD])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", [SMALL, CASE], ids=["small", "large"])
def test_training_equals_memory(
    case: Case, dtype: torch.dtype, threshold: int, overlap: str, tmp_path: Path
) -> None:
    scaling = LOSS_SCALE if dtype is FP16 else ()
    case = dataclasses.replace(case, dtype=dtype, scaling=scaling)
    with case.engine(tmp_path, param_persistence_threshold=threshold, overlap=overlap) as engine:
        trained = train_offloaded(engine, case)
        types = {name: value.dtype for name, value in engine.module.state_dict().items()}
    assert types == {name: p.dtype for name, p in case.model().named_parameters()}
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


@pytest.mark.parametrize(
    "changed",
    [
        {"compute_dtype": BF16},
        {"accumulation": 2},
        {"frozen": ("down", "norm_1", "embed")},
        {"state_dtype": "bf16"},
    ],
    ids=lambda changed: "-".join(map(str, changed)),
)
def test_other_settings_equal_memory(changed: dict[str, Any], tmp_path: Path) -> None:
    case = dataclasses.replace(CASE, **changed)
    with case.engine(tmp_path, param_persistence_threshold=THRESHOLD) as engine:
        trained = train_offloaded(engine, case)
        computes = engine.module.blocks[1].down[1].bias.dtype
    assert computes is FP32
    assert_same(trained, train_in_memory(case))


@pytest.mark.parametrize(
    "changed",
    [
        {"host_memory": "4MiB"},
        {"placement": "host", "host_memory": "64MiB"},
        {"placement": {"weights": "host", "state": "disk"}, "host_memory": "64MiB"},
        {"durability": "none"},
        {"param_persistence_threshold": 10**9, "device_memory": "64MiB"},
    ],
    ids=lambda changed: "-".join(map(str, changed.values())),
)
def test_every_placement_has_the_same_bits(changed: dict[str, Any], tmp_path: Path) -> None:
    with CASE.engine(tmp_path, **changed) as engine:
        assert_same(train_offloaded(engine, CASE), train_in_memory(CASE))


def test_a_checkpoint_goes_on_in_other_units(tmp_path: Path) -> None:
    trained = Trained()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    with CASE.engine(tmp_path / "a") as engine:
        for step in range(2):
            engine_step(engine, CASE, step, trained)
        engine.save_checkpoint(tmp_path / "ckpt").wait()
    with CASE.engine(tmp_path / "b", param_persistence_threshold=THRESHOLD) as engine:
        assert engine.load_checkpoint(tmp_path / "ckpt")[0] is not None
        for step in range(2, CASE.num_steps):
            engine_step(engine, CASE, step, trained)
        collect_engine(engine, trained)
    assert_same(trained, train_in_memory(CASE))


@pytest.mark.parametrize("threshold", [0, THRESHOLD])
def test_exports_and_edits_keep_the_types(threshold: int, tmp_path: Path) -> None:
    with CASE.engine(tmp_path, param_persistence_threshold=threshold) as engine:
        engine_step(engine, CASE, 0, Trained())
        with engine.gathered([ROUTER, BIAS]):
            parameters = dict(engine.module.named_parameters())
            parameters[ROUTER].data.add_(1e-6)
            parameters[BIAS].data.fill_(1 / 3)
        masters = {name: engine.full_fp32_param(name) for name in parameters}
        engine.export(tmp_path / "own")
        engine.export(tmp_path / "fp32", dtype="fp32")
    assert masters[BIAS].eq(torch.tensor(1 / 3)).all()
    own = load_file(tmp_path / "own/model.safetensors")
    assert own[UP].dtype is BF16
    assert same_bits(own[ROUTER], masters[ROUTER])
    whole = load_file(tmp_path / "fp32/model.safetensors")
    assert all(same_bits(whole[name], value) for name, value in masters.items())


def test_a_model_that_is_mostly_fp32_moves_as_it_is_told(tmp_path: Path) -> None:
    model = Case().model()
    model.head.weight.data = model.head.weight.data.bfloat16()
    with OffloadEngine(model, nvme_path=tmp_path, compute_dtype=FP32) as engine:
        assert {value.dtype for value in engine.module.state_dict().values()} == {BF16}
