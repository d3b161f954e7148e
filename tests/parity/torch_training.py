"""The same training twice: offloaded, and in memory with a torch optimizer on fp32 masters.

The model has an odd-sized matrix, biases, and a layer that some steps do not use.  What the engine
promises about numbers is in `oracle.py`; here only the update is torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadEngine, kernels

NUM_STEPS = 5
WIDTH = 43
CLIPPING = 0.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """`forward(x, y, use_spare)` gives a loss; `matrices` leaves vectors frozen."""

    def __init__(self, *, matrices: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.spare = nn.Linear(WIDTH, WIDTH)
        if matrices:
            for param in self.parameters():
                param.requires_grad_(param.ndim == 2)

    def forward(self, x: Tensor, y: Tensor, use_spare: bool) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((self.spare(x) if use_spare else x) - y).square().mean()


def build(**options: Any) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Network(**options)


def batch(step: int) -> tuple[Tensor, Tensor, bool]:
    """The spare layer is used in every second step, the first not among them."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(4, WIDTH, generator=generator) for _ in range(2))
    return x, y, step % 2 == 1


def groups_of(model: nn.Module, base: dict[str, Any], spare: dict[str, Any]) -> list[dict]:
    """Two groups: everything but the spare layer, and the spare layer with other settings."""
    members: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, param in model.named_parameters():
        if param.requires_grad:
            members[name.startswith("spare")].append(param)
    return [{"params": members[False], **base}, {"params": members[True], **base, **spare}]


@dataclass
class InMemory:
    """Training in plain torch; `masters` are fp32, the model holds their bf16 halves as fp32.

    With a loss scale it holds them rounded to fp16.
    """

    model: nn.Module
    cls: type[torch.optim.Optimizer]
    base: dict[str, Any]
    spare: dict[str, Any]
    scale: float | None = None
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.masters = {
            name: nn.Parameter(param.detach().clone())
            for name, param in self.model.named_parameters()
            if param.requires_grad
        }
        spare = [param for name, param in self.masters.items() if name.startswith("spare")]
        rest = [param for name, param in self.masters.items() if not name.startswith("spare")]
        self.optimizer = self.cls(
            [{"params": rest, **self.base}, {"params": spare, **self.base, **self.spare}],
            **self.base,  # Adagrad's initial value is the constructor's, whatever a group says
        )
        self._fill()

    def train(self, first: int, stop: int) -> InMemory:
        for step in range(first, stop):
            (self.model(*batch(step)) * (self.scale or 1.0)).backward()
            self._step()
        return self

    def _step(self) -> None:
        total = 0.0
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                grad = param.grad.to(torch.float16 if self.scale else torch.bfloat16).float()
                self.masters[name].grad = grad
                norm = kernels.Norm(1)
                kernels.norm_add(grad, norm, 0)
                total += norm.value(0)
                param.grad = None
        self.norms.append(math.sqrt(total) / (self.scale or 1.0))
        factor = min(1.0, CLIPPING / (self.norms[-1] + 1e-6)) / (self.scale or 1.0)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._fill()

    def _fill(self) -> None:
        for name, param in self.model.named_parameters():
            master = self.masters.get(name, param).detach()
            if self.scale:
                param.data = master.half().float()
                continue
            hi = torch.empty(master.shape, dtype=torch.bfloat16)
            kernels.split(master.contiguous(), hi, torch.empty(master.shape, dtype=torch.int16))
            param.data = hi.float()


@contextmanager
def engine(
    folder: Path, optimizer: Any, base: dict[str, Any], spare: dict[str, Any],
    *, options: dict[str, Any] | None = None, **settings: Any,
) -> Iterator[OffloadEngine]:  # fmt: skip
    """The offloaded twin; every tensor in the store unless `settings` say otherwise."""
    model = build(**(options or {}))
    folder.mkdir(exist_ok=True)
    settings = {
        "compute_dtype": torch.float32,
        "gradient_clipping": CLIPPING,
        "param_persistence_threshold": 0,
        "chunk_elems": 4096,
        "host_memory": "8MiB",
        "placement": "disk",
        "device": "cpu",
        **settings,
    }
    made = OffloadEngine(
        model, nvme_path=folder, optimizer=optimizer, params=groups_of(model, base, spare),
        **settings,
    )  # fmt: skip
    with made:
        yield made


def train(engine: OffloadEngine, first: int, stop: int) -> list[float]:
    norms = []
    for step in range(first, stop):
        engine.backward(engine(*batch(step)))
        engine.step()
        norms.append(engine.grad_norm)
    return norms


def masters(engine: OffloadEngine) -> dict[str, Tensor]:
    return {
        name: engine.full_fp32_param(param)
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def assert_moved(trained: dict[str, Tensor], **options: Any) -> None:
    """Every trained parameter has changed: a comparison of nothing would pass."""
    before = dict(build(**options).named_parameters())
    assert [name for name in trained if torch.equal(before[name], trained[name])] == []


def assert_same_training(engine: OffloadEngine, memory: InMemory) -> None:
    """Train `engine` as `memory` was, and compare norms and masters bit for bit."""
    assert train(engine, 0, NUM_STEPS) == memory.norms
    ours = masters(engine)
    different = [name for name in ours if not torch.equal(ours[name], memory.masters[name])]
    assert not different
