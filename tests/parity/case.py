"""A case: one model and one way to train it, run in memory and offloaded, compared bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import torch
from oracle import Group, Oracle
from torch import Tensor, nn

from offload import OffloadEngine

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """`options` and `frozen` (parts of names) complete the model; hashable, for a cache."""

    kind: type[nn.Module] = models.Decoder
    options: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()  # parts of names that stay so; the rest of the model is in `dtype`
    dtype: torch.dtype = BF16
    compute_dtype: torch.dtype = FP32
    groups: tuple[Group, ...] = (Group(lr=1e-2),)
    accumulation: int = 1
    clipping: float = 0.0
    num_steps: int = 4
    state_dtype: str = "fp32"
    batch_options: tuple[tuple[str, Any], ...] = ()
    scaling: tuple[tuple[str, Any], ...] = ()  # of the loss, with dtype FP16

    def model(self) -> nn.Module:
        model = models.build(self.kind, **dict(self.options))
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in self.frozen))
            if self.fp32 and not any(part in name for part in self.fp32):
                param.data = param.data.to(self.dtype)
        return model

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The micro-steps of one step."""
        first = step * self.accumulation
        options = dict(self.batch_options)
        return [models.batch(first + index, **options) for index in range(self.accumulation)]

    def oracle(self) -> Oracle:
        scaling = dict(self.scaling)
        return Oracle(
            self.model(), self.dtype, self.compute_dtype, self.groups, self.clipping,
            state_dtype=self.state_dtype, scale=2.0 ** scaling.get("initial_scale_power", 0),
            window=scaling.get("loss_scale_window", 1000),
        )  # fmt: skip

    @contextmanager
    def engine(self, nvme_path: Path, **settings: Any) -> Iterator[OffloadEngine]:
        """The offloaded model: every tensor in the store, as little memory as works."""
        model = self.model()
        engine = OffloadEngine(model, **self.settings(model, nvme_path) | settings)
        try:
            yield engine
        finally:
            engine.close()

    def settings(self, model: nn.Module, nvme_path: Path) -> dict[str, Any]:
        return {
            "nvme_path": nvme_path,
            "optimizer": "adamw",
            "params": self.param_groups(model),
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "dtype": self.dtype,
            "compute_dtype": self.compute_dtype,
            "state_dtype": self.state_dtype,
            "host_memory": "16MiB",
            "device_memory": "8MiB",
            "chunk_elems": 4096,
            "placement": "disk",  # everything moves
            "param_persistence_threshold": 0,
            "device": "cpu",
            **dict(self.scaling),
        }

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        members: list[list[nn.Parameter]] = [[] for _ in self.groups]
        for name, param in model.named_parameters():
            if param.requires_grad:
                parts = [group.part in name for group in self.groups]
                members[parts.index(True)].append(param)
        return [
            {"params": params, **group.settings()}
            for params, group in zip(members, self.groups, strict=True)
        ]


@dataclass
class Trained:
    """What training left: per micro-step, per step, per parameter."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)  # None: the step was skipped
    scales: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)
    exp_avgs: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sqs: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def train_in_memory(case: Case) -> Trained:
    oracle, trained = case.oracle(), Trained()
    for step in range(case.num_steps):
        oracle_step(oracle, case, step, trained)
    return collect_oracle(oracle, trained)


def oracle_step(oracle: Oracle, case: Case, step: int, trained: Trained) -> None:
    for batch in case.batches(step):
        loss = oracle.model(*batch)
        mean = loss / case.accumulation if case.accumulation > 1 else loss
        (mean * oracle.scale).backward()
        oracle.keep_gradients()
        trained.losses.append(loss.item())
    taken = oracle.step()
    trained.norms.append(oracle.grad_norm if taken else None)
    if case.scaling:
        trained.scales.append(oracle.scale)


def engine_step(engine: OffloadEngine, case: Case, step: int, trained: Trained) -> None:
    for batch in case.batches(step):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        trained.losses.append(loss.item())
    trained.norms.append(engine.grad_norm if math.isfinite(engine.grad_norm) else None)
    if case.scaling:
        trained.scales.append(engine.scale.value)


def train_offloaded(engine: OffloadEngine, case: Case) -> Trained:
    trained = Trained()
    for step in range(case.num_steps):
        engine_step(engine, case, step, trained)
    return collect_engine(engine, trained)


def collect_oracle(oracle: Oracle, trained: Trained) -> Trained:
    for name, state in oracle.states.items():
        trained.masters[name] = state.master
        trained.exp_avgs[name] = state.exp_avg.clone()
        trained.exp_avg_sqs[name] = state.exp_avg_sq.clone()
    return trained


def collect_engine(engine: OffloadEngine, trained: Trained) -> Trained:
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            trained.masters[name] = engine.full_fp32_param(param).flatten()
            trained.exp_avgs[name] = engine.full_optimizer_state(param, "exp_avg").flatten()
            moment = engine.full_optimizer_state(param, "exp_avg_sq")
            trained.exp_avg_sqs[name] = moment.flatten()
    return trained


def assert_same(offloaded: Trained, in_memory: Trained) -> None:
    """Equal bit for bit; losses and norms in order, so that the first difference is named."""
    assert offloaded.losses == in_memory.losses
    assert offloaded.norms == in_memory.norms
    assert offloaded.scales == in_memory.scales
    for role in ("masters", "exp_avgs", "exp_avg_sqs"):
        ours, theirs = getattr(offloaded, role), getattr(in_memory, role)
        assert ours.keys() == theirs.keys()
        different = [name for name in theirs if not same_bits(ours[name], theirs[name])]
        assert not different, f"{role} differ: {different}"


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal as bytes: NaN equals itself, and the zeros differ."""
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    return torch.equal(as_bytes(first), as_bytes(second))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def assert_learned(case: Case, trained: Trained) -> None:
    """A comparison of weights that never moved would pass for nothing."""
    before = collect_oracle(case.oracle(), Trained()).masters
    assert all(math.isfinite(loss) for loss in trained.losses)
    moved = [name for name in before if not torch.equal(before[name], trained.masters[name])]
    assert moved == list(before)


def assert_offloaded(engine: OffloadEngine) -> None:
    """Every unit left the device at least once and came back."""
    fetches, evictions = dict(engine.metrics.fetches), dict(engine.metrics.evictions)
    assert len(fetches) >= 2
    assert all(count >= 2 for count in fetches.values()), fetches
    assert all(evictions.get(name, 0) >= 1 for name in fetches), evictions
