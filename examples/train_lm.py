"""Train a language model on the standard library's text, in less memory than its state takes.

    offload-train --nvme /mnt/nvme --host-memory 256MiB --device-memory 128MiB examples/train_lm.py

The loop is that of plain torch; `--no-offload` runs it without the engine, all in memory.
Writes metrics.jsonl (a row per step, then a summary) and loss.png to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corpus
import torch
from decoder import Decoder, Shape
from torch import Tensor, nn
from tqdm import tqdm


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=14)
    model.add_argument("--width", type=int, default=768)
    model.add_argument("--heads", type=int, default=12)
    model.add_argument("--tied", action="store_true", help="embedding and head share a weight")
    model.add_argument("--checkpointing", action="store_true", help="recompute activations")
    data = parser.add_argument_group("data")
    data.add_argument("--text", choices=("docs", "source"), default="docs")
    data.add_argument("--vocab", choices=("bytes", "bpe"), default="bytes")
    data.add_argument("--seq", type=int, default=64)
    data.add_argument("--batch", type=int, default=4)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=120)
    training.add_argument("--accumulation", type=int, default=1, help="micro-steps in a step")
    training.add_argument("--lr", type=float, default=6e-4)
    training.add_argument("--clip", type=float, default=1.0, help="greatest gradient norm; 0: any")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--eval-every", type=int, default=40, help="steps; 0: only at the end")
    training.add_argument("--max-minutes", type=float, default=math.inf, help="then stop early")
    training.add_argument("--out", type=Path, default=Path("runs/train_lm"))
    training.add_argument("--resume", action="store_true", help="go on where the store stands")
    training.add_argument("--no-offload", action="store_true", help="all in memory, no engine")
    return parser.parse_args()


class InMemory:
    """Plain training behind the calls that the loop makes: what the engine must be equal to."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], args: argparse.Namespace):
        self.model, self.clip, self.accumulation = model, args.clip, args.accumulation
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        self.global_step, self.micro_steps, self.grad_norm = 0, 0, 0.0
        self.train, self.eval, self.resumed = model.train, model.eval, False

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()
        self.micro_steps += 1

    def step(self) -> None:
        if self.micro_steps % self.accumulation == 0:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or math.inf)
            self.grad_norm = float(norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_step += 1

    def close(self) -> None:
        pass


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; norms do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def make_model(args: argparse.Namespace, vocab: int) -> Decoder:
    """The model, its weights on disk from the start unless all is to stay in memory."""
    shape = Shape(
        vocab=vocab,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        tied=args.tied,
        checkpointing=args.checkpointing,
    )
    torch.manual_seed(args.seed)
    if args.no_offload:
        return Decoder(shape)
    from offload import on_disk_init

    with on_disk_init():
        return Decoder(shape)


def make_trainer(model: nn.Module, args: argparse.Namespace, device: torch.device) -> Any:
    groups = parameter_groups(model)
    if args.no_offload:
        return InMemory(model.to(device), groups, args)
    from offload import OffloadEngine

    return OffloadEngine(  # path and budgets come from offload-train
        model,
        params=groups,
        optimizer="adamw",
        lr=args.lr,
        betas=(0.9, 0.95),
        gradient_accumulation_steps=args.accumulation,
        gradient_clipping=args.clip,
        device=device,
        resume=True if args.resume else None,
    )


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: linear over the first tenth, then down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.55 + 0.45 * math.cos(math.pi * progress)


@dataclass
class Record:
    """The numbers of a run: one JSON object a line, written as they come."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def open(self, first_step: int) -> None:
        """Keep the rows of the steps that the resumed state has behind it, drop the others."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first_step and self.path.exists():
            rows = [json.loads(line) for line in self.path.read_text().splitlines()]
            self.rows = [row for row in rows if row.get("step", math.inf) <= first_step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def points(self, key: str) -> tuple[list[int], list[float]]:
        rows = [row for row in self.rows if key in row and "step" in row]
        return [row["step"] for row in rows], [row[key] for row in rows]


def draw(record: Record, entropy: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(*record.points("loss"), label="training", linewidth=1)
    axes.plot(*record.points("validation_loss"), "o-", label="validation")
    axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy of validation")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


class Run:
    """One training run: the loop, its numbers, its progress bar."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.text = corpus.load(args.text, args.vocab)
        model = make_model(args, self.text.vocab)
        self.num_params = sum(p.numel() for p in model.parameters())
        self.trainer = make_trainer(model, args, self.device)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.trainer.optimizer, lambda step: warm_up_then_cosine(step, args.steps)
        )
        self.batches = corpus.Batches(
            self.text.train, batch=args.batch, seq=args.seq, seed=args.seed
        )
        if not args.no_offload:
            # What belongs to a generation comes back with it: the schedule, the order of the data.
            self.trainer.track(scheduler=self.scheduler, batches=self.batches)
        self.record = Record(args.out / "metrics.jsonl")
        self.record.open(self.trainer.global_step)

    def train(self) -> None:
        first, last = self.trainer.global_step, self.args.steps
        end = time.monotonic() + 60 * self.args.max_minutes
        with tqdm(initial=first, total=last, unit="step", mininterval=1, smoothing=0.1) as bar:
            for step in range(first + 1, last + 1):
                row = self.one_step()
                self.record.add(step=step, **row)
                bar.set_postfix_str(self.describe(row), refresh=False)
                bar.update()
                due = self.args.eval_every and step % self.args.eval_every == 0
                if due and step < last:
                    self.record.add(step=step, validation_loss=self.validate())
                if time.monotonic() > end:
                    break

    def one_step(self) -> dict[str, Any]:
        start = time.perf_counter()
        read, written = self.traffic()
        losses = []
        for _ in range(self.args.accumulation):
            tokens, targets = (part.to(self.device) for part in self.batches.next())
            loss = self.trainer(tokens, targets)
            self.trainer.backward(loss)
            self.trainer.step()
            losses.append(loss.detach())
        lr = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        now = self.traffic()
        seconds = time.perf_counter() - start
        num_tokens = self.args.accumulation * self.args.batch * self.args.seq
        return {
            "loss": float(torch.stack(losses).mean()),
            "lr": lr,
            "grad_norm": float(self.trainer.grad_norm),
            "seconds": seconds,
            "tokens_per_s": num_tokens / seconds,
            "read_bytes": now[0] - read,
            "write_bytes": now[1] - written,
            **self.account(),
        }

    def account(self) -> dict[str, Any]:
        """Seconds of the step by phase, and of its waits by cause."""
        if self.args.no_offload:
            return {}
        last = self.trainer.metrics.last
        return {"phases": last["seconds"], "stalls": last["stalls"]}

    def describe(self, row: dict[str, Any]) -> str:
        """For the progress bar."""
        words = f"loss {row['loss']:.3f}, {row['tokens_per_s']:.0f} tokens/s"
        return words if self.args.no_offload else f"{words}, {self.trainer.metrics.short()}"

    def traffic(self) -> tuple[int, int]:
        if self.args.no_offload:
            return 0, 0
        metrics = self.trainer.metrics
        return metrics.total_read_bytes, metrics.total_write_bytes

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over windows spread evenly over the validation text."""
        num_batches, rows, seq = 4, 16, self.args.seq
        tokens = self.text.validation
        starts = torch.linspace(0, len(tokens) - seq - 1, num_batches * rows).long()
        self.trainer.eval()
        losses = []
        for part in starts.view(num_batches, rows, 1):
            inputs = (half.to(self.device) for half in corpus.windows(tokens, part, seq))
            losses.append(float(self.trainer(*inputs)))
        self.trainer.train()
        return sum(losses) / num_batches

    def finish(self) -> None:
        loss, entropy = self.validate(), self.text.unigram_entropy()
        self.record.add(step=self.trainer.global_step, validation_loss=loss)
        self.record.add(
            final=True,
            validation_loss=loss,
            unigram_entropy=entropy,
            parameters=self.num_params,
            steps=self.trainer.global_step,
        )
        self.trainer.close()
        picture = self.args.out / "loss.png"
        draw(self.record, entropy, picture)
        print(f"validation loss {loss:.3f} nats per token; unigram entropy {entropy:.3f}")
        print(f"numbers: {self.record.path}   curve: {picture}")


def main() -> None:
    run = Run(parse_arguments())
    run.train()
    run.finish()


if __name__ == "__main__":
    main()
