"""A small training run whose every part must come back: data order, schedule, dropout, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor, nn

from offload import OffloadEngine

NUM_BATCHES = 40
SAVED_AT = 5
CONTINUED = 4
SMALL = {
    "host_memory": "16MiB",
    "device_memory": "8MiB",
    "chunk_elems": 4096,
    "param_persistence_threshold": 64,
    "device": "cpu",
    "compute_dtype": torch.float32,
    "lr": 1e-2,
    "gradient_clipping": 1.0,
}


class Noisy(models.Decoder):
    """Draws dropout masks and keeps a running mean in a buffer; one block is frozen in part."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("mean", torch.zeros(self.embed.embedding_dim))
        self.blocks[1].up.weight.requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden = super().hidden(tokens)
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        return nn.functional.dropout(hidden + self.mean, 0.1, self.training)


class Epochs:
    """Batches in an order drawn by torch.randperm, epoch after epoch."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def next(self) -> tuple[Tensor, Tensor]:
        if not self.left:
            self.left = torch.randperm(NUM_BATCHES)[:7].tolist()
        return models.batch(self.left.pop())

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


class Run:
    """The model, its engine, a scheduler, the data."""

    def __init__(
        self, path: Path, *, seed: int = 0, model: Callable[..., Any] = Noisy, **settings: Any
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        module = models.build(model, seed=seed)
        self.engine = OffloadEngine(module, **{"nvme_path": path, **SMALL, **settings})
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.engine.optimizer, max_lr=2e-2, total_steps=60
        )
        self.epochs = Epochs()
        self.engine.track(scheduler=self.scheduler, epochs=self.epochs)
        self.losses: list[float] = []

    @property
    def store_folder(self) -> Path:
        (folder,) = self.path.glob("offload-*")
        return folder

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            loss = self.engine(*self.epochs.next())
            self.engine.backward(loss)
            self.engine.step()
            self.scheduler.step()
            self.losses.append(loss.item())


@dataclass(frozen=True)
class Reference:
    """A checkpoint saved after step 5, and the four steps after it."""

    checkpoints: Path
    saved: dict[str, Any]
    losses: list[float]
    after: dict[str, Any]


@contextlib.contextmanager
def running(path: Path, **options: Any) -> Iterator[Run]:
    run = Run(path, **options)
    try:
        yield run
    finally:
        run.engine.close()


def state_of(run: Run) -> dict[str, Any]:
    """Everything that training changes, comparable with `==`."""
    engine = run.engine
    state: dict[str, Any] = {"step": engine.global_step, "rng": as_bytes(torch.get_rng_state())}
    for name, param in engine.module.named_parameters():
        state[f"{name}.master"] = as_bytes(engine.full_fp32_param(param))
        if param.requires_grad:
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{name}.{moment}"] = as_bytes(engine.full_optimizer_state(param, moment))
    for name, buffer in engine.module.named_buffers():
        state[name] = as_bytes(buffer)
    state["lr"] = [group["lr"] for group in engine.optimizer.param_groups]
    state["betas"] = [group["betas"] for group in engine.optimizer.param_groups]
    state["schedule"] = run.scheduler.last_epoch
    state["left"] = list(run.epochs.left)
    return state


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [key for key in first.keys() | second.keys() if first.get(key) != second.get(key)]


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert not differences(first, second)
