"""Four configuration files in the style of public recipes, and the same training in memory.

What a file says is written down again here by hand, for the oracle; only the values of a schedule
come from `offload.optim.schedules`, which has tests of its own.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import models
import torch
from oracle import Group, Oracle
from torch import Tensor

from offload.deepspeed_config.auto import fill_auto
from offload.deepspeed_config.source import read
from offload.optim.schedules import OWN

RECIPES = Path(__file__).parent / "recipes"
NUM_STEPS = 4
# What a test needs beside any file: a model so small that everything would stay on the device.
SMALL = {"device": "cpu", "compute_dtype": "fp32", "device_memory": "8MiB", "host_memory": "64MiB"}
AUTO_VALUES = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": 4,
    "gradient_clipping": 0.7, "bf16.enabled": True, "optimizer.params.lr": 5e-3,
    "optimizer.params.betas": [0.9, 0.98], "optimizer.params.eps": 1e-7,
    "optimizer.params.weight_decay": 0.05, "scheduler.params.total_num_steps": 8,
    "scheduler.params.warmup_num_steps": 2,
    "zero_optimization.stage3_param_persistence_threshold": 480,
    "zero_optimization.stage3_prefetch_bucket_size": 2073.6,
    "zero_optimization.reduce_bucket_size": 2304,
}  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """What a file says, for training in memory."""

    dtype: torch.dtype
    group: Group
    clipping: float
    accumulation: int
    schedule: tuple[str, dict[str, Any]]
    decoupled: bool = True
    scale: float = 1.0
    window: int = 1000


TWINS = {
    "zero3_cpu.json": Twin(
        torch.bfloat16, Group("", 1e-2, (0.9, 0.95), 1e-8, 0.1), 1.0, 2,
        ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}),
    ),
    "zero3_nvme_optimizer.json": Twin(
        torch.bfloat16, Group("", 3e-3, (0.9, 0.999), 1e-8, 0.01), 0.5, 1,
        (
            "WarmupDecayLR",
            {
                "total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 3e-3,
                "warmup_type": "linear",
            },
        ),
        decoupled=False,
    ),
    "zero3_nvme.json": Twin(
        torch.float16, Group("", 1e-2, (0.8, 0.999), 1e-8, 3e-7), 0.3, 2,
        (
            "OneCycle",
            {
                "cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2,
                "decay_step_size": 1, "decay_lr_rate": 0.5, "cycle_min_mom": 0.8,
                "cycle_max_mom": 0.95,
            },
        ),
        scale=2.0**10, window=2,
    ),
    "zero3_auto.json": Twin(
        torch.bfloat16, Group("", 5e-3, (0.9, 0.98), 1e-7, 0.05), 0.7, 2,
        ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 2}),
    ),
}  # fmt: skip
NAMES = tuple(TWINS)


@dataclass
class Result:
    """What training left."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


def model() -> torch.nn.Module:
    return models.build(models.Decoder)


def batches(name: str, step: int) -> list[tuple[Tensor, Tensor]]:
    count = TWINS[name].accumulation
    return [models.batch(step * count + index) for index in range(count)]


def config_file(name: str, folder: Path) -> Path:
    """The file with `folder` for its drive; "auto" is filled as transformers would."""
    text = (RECIPES / name).read_text().replace("/local_nvme", str(folder))
    path = folder / name
    path.write_text(text)
    if "auto" in name:
        path.write_text(json.dumps(fill_auto(read(path), AUTO_VALUES)))
    return path


@functools.cache
def in_memory(name: str) -> Result:
    twin, result = TWINS[name], Result()
    oracle = Oracle(
        model(), twin.dtype, torch.float32, (twin.group,), twin.clipping,
        decoupled=twin.decoupled, scale=twin.scale, window=twin.window,
    )  # fmt: skip
    dummy = torch.optim.Adam(
        [torch.nn.Parameter(torch.zeros(1))], lr=twin.group.lr, betas=twin.group.betas
    )
    kind, params = twin.schedule
    scheduler = OWN[kind](dummy, **params)
    for step in range(NUM_STEPS):
        now = dummy.param_groups[0]
        oracle.groups = (replace(twin.group, lr=now["lr"], betas=now["betas"]),)
        for batch in batches(name, step):
            loss = oracle.model(*batch)
            (loss / twin.accumulation * oracle.scale).backward()
            oracle.keep_gradients()
            result.losses.append(loss.item())
        assert oracle.step()
        result.norms.append(oracle.grad_norm)
        dummy.step()
        scheduler.step()
    result.masters = {key: state.master for key, state in oracle.states.items()}
    return result


def assert_equal(ours: Result, name: str) -> None:
    """Bit for bit; and something was learned."""
    theirs = in_memory(name)
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    assert ours.masters.keys() == theirs.masters.keys()
    pairs = [(key, ours.masters[key], theirs.masters[key]) for key in theirs.masters]
    different = [key for key, our, their in pairs if not torch.equal(our, their)]
    assert not different
    start = dict(model().named_parameters())
    moved = [key for key in start if not torch.equal(start[key].flatten(), ours.masters[key])]
    assert moved == list(start)
    assert all(math.isfinite(loss) for loss in ours.losses)
