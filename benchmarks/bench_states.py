"""Does training with smaller optimizer state end at the same loss?

    python benchmarks/bench_states.py [--shapes demo,small] [--seeds 0,1,2] [--steps 300] [--save]

Trains the example's decoder on its text, in memory, with the kernels that the engine uses (its
results are the same bits: tests/parity/test_state_dtypes.py), once for each format of the moments,
seed and size. A format passes where its mean validation loss lies within the spread of the fp32
seeds, or below. Every finished run is kept in `--out`, and not repeated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from meters import describe_machine, keep_result, result_path
from torch import nn

from offload import kernels
from offload.optim.reference import TensorState
from offload.partition.states import StateTable

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
import corpus  # noqa: E402
from decoder import Decoder, Shape  # noqa: E402

FORMATS = ("fp32", "bf16", "int8")
SHAPES = {
    "demo": {"layers": 14, "width": 768, "heads": 12},
    "small": {"layers": 8, "width": 320, "heads": 5},
}
BATCH, SEQ = 2, 64
VALIDATION_BATCHES = 32
LR, BETAS, EPS, DECAY, CLIP = 6e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Job:
    shape: str
    state_dtype: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.state_dtype}-{self.seed}-{self.steps}"


class Training:
    """A model whose bf16 weights are the high halves of the masters."""

    def __init__(self, job: Job, vocab: int) -> None:
        torch.manual_seed(job.seed)
        self.model = Decoder(
            Shape(vocab=vocab, tied=False, checkpointing=False, **SHAPES[job.shape])
        )
        self.num_params = sum(parameter.numel() for parameter in self.model.parameters())
        table = StateTable.of(MOMENTS, job.state_dtype)
        embeddings = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        self.states: dict[str, TensorState] = {}
        for name, parameter in self.model.named_parameters():
            plain = parameter.dim() < 2 or id(parameter) in embeddings
            state = TensorState.of(parameter, name=name, table=table, plain=plain)
            parameter.data = state.param.view(parameter.shape)
            self.states[name] = state

    def step(self, number: int, factor: float, batch: Any) -> float:
        loss = self.model(*batch)
        loss.backward()
        parameters = dict(self.model.named_parameters())
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads.values()]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        for name, grad in grads.items():
            row = kernels.adam_row(
                LR * factor, BETAS, EPS, DECAY if grad.dim() >= 2 else 0.0, number,
                decoupled=True, grad_scale=min(1.0, CLIP / (norm + 1e-6)),
            )  # fmt: skip
            if self.states[name].update(grad, row):
                raise click.ClickException(f"step {number}: {name} is not finite")
            parameters[name].grad = None
        return loss.item()

    @torch.no_grad()
    def validate(self, text: corpus.Corpus) -> float:
        starts = torch.linspace(0, len(text.validation) - SEQ - 2, VALIDATION_BATCHES * BATCH)
        batches = starts.long().view(VALIDATION_BATCHES, BATCH, 1)
        losses = (self.model(*corpus.windows(text.validation, at, SEQ)) for at in batches)
        return mean(loss.item() for loss in losses)


def warm_up_then_cosine(step: int, steps: int) -> float:
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    half = torch.pi * (step - warm_up) / max(1, steps - warm_up)
    return 0.55 + 0.45 * float(torch.cos(torch.tensor(half)))


def train(job: Job, text: corpus.Corpus) -> dict[str, Any]:
    start = time.perf_counter()
    training = Training(job, text.vocab)
    batches = corpus.Batches(text.train, batch=BATCH, seq=SEQ, seed=job.seed)
    losses, validation = [], {}
    for step in range(job.steps):
        factor = warm_up_then_cosine(step, job.steps)
        losses.append(training.step(step + 1, factor, batches.next()))
        if (step + 1) % 100 == 0 or step + 1 == job.steps:
            validation[step + 1] = training.validate(text)
    return {
        **asdict(job), "num_params": training.num_params, "seconds": time.perf_counter() - start,
        "loss": losses, "validation": validation,
    }  # fmt: skip


def final(run: dict[str, Any]) -> float:
    return float(list(run["validation"].values())[-1])


def rows_of(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Mean and spread of the last validation loss, and whether it lies within that of fp32."""
    for shape in dict.fromkeys(run["shape"] for run in runs):
        most = max(final(r) for r in runs if (r["shape"], r["state_dtype"]) == (shape, "fp32"))
        for state_dtype in FORMATS:
            mine = [r for r in runs if (r["shape"], r["state_dtype"]) == (shape, state_dtype)]
            ends = [final(run) for run in mine]
            if ends:
                yield {
                    "shape": shape, "num_params": mine[0]["num_params"],
                    "state_dtype": state_dtype, "seeds": len(ends), "steps": mine[0]["steps"],
                    "mean": mean(ends), "least": min(ends), "most": max(ends),
                    "within_fp32": mean(ends) <= most,
                }  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | parameters | state | seeds | steps | validation | least to most | within fp32 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['shape']} | {row['num_params'] / 1e6:.1f} M | {row['state_dtype']} |"
            f" {row['seeds']} | {row['steps']} | {row['mean']:.4f} |"
            f" {row['least']:.4f} to {row['most']:.4f} | {'yes' if row['within_fp32'] else 'NO'} |"
        )
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(run["shape"] for run in runs))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(6 * len(shapes), 4), squeeze=False)
    for shape, axis in zip(shapes, axes[0], strict=True):
        for color, state_dtype in zip(("black", "tab:blue", "tab:orange"), FORMATS, strict=True):
            mine = [r for r in runs if (r["shape"], r["state_dtype"]) == (shape, state_dtype)]
            for index, run in enumerate(mine):
                steps = [int(step) for step in run["validation"]]
                values = list(run["validation"].values())
                label = state_dtype if not index else None
                axis.plot(steps, values, "o-", color=color, alpha=0.6, markersize=3, label=label)
        axis.set(title=shape, xlabel="step", ylabel="validation loss, nats per byte")
        axis.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--shapes", default="small,demo")
@click.option("--formats", default=",".join(FORMATS))
@click.option("--seeds", default="0,1,2")
@click.option("--steps", default=300)
@click.option("--threads", default=2, help="Of torch.")
@click.option("--out", default="runs/states", type=click.Path(path_type=Path))
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
def main(**options: Any) -> None:
    torch.set_num_threads(options["threads"])
    text = corpus.load("docs", "bytes")
    out: Path = options["out"]
    out.mkdir(parents=True, exist_ok=True)
    runs = []
    for shape in options["shapes"].split(","):
        for seed in options["seeds"].split(","):
            for state_dtype in options["formats"].split(","):
                job = Job(shape, state_dtype, int(seed), options["steps"])
                kept = out / f"{job.name}.json"
                if not kept.exists():
                    kept.write_text(json.dumps(train(job, text)))
                runs.append(json.loads(kept.read_text()))
                click.echo(f"{job.name}: {final(runs[-1]):.4f} in {runs[-1]['seconds']:.0f} s")
    rows = list(rows_of(runs))
    click.echo(table_of(rows))
    if options["save"]:
        result_path("states", ".md").write_text(table_of(rows) + "\n")
        draw(runs, result_path("states", ".png"))
        kept = keep_result("states", {"machine": describe_machine(), "rows": rows, "runs": runs})
        click.echo(f"\nwritten: {kept}, .md, .png")


if __name__ == "__main__":
    main()
