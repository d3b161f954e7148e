"""What do micro-steps cost, one after another and unit by unit?

    python benchmarks/bench_layers.py [--micro-steps 8] [--rounds 3] [--save]

The same decoder with activation checkpointing, in rounds: one micro-step a step, then several, in
horizontal and in layer-major order. Bytes are the engine's own count.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from meters import describe_machine, keep_result, memory_bytes, told_settings

from offload import OffloadEngine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
from decoder import Decoder, Shape  # noqa: E402

VOCAB = 256
WANTED_BYTES = 1.03  # of the bytes of a step of one micro-step
WARM_UP = 2


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: str
    layers: int
    width: int
    seq: int
    micro_steps: int
    steps: int
    rounds: int
    host: str
    save: bool
    theme: str


def run(settings: Settings, folder: Path, num_micro_steps: int, order: str) -> dict[str, Any]:
    """Medians over the steps of one engine."""
    torch.manual_seed(0)
    shape = Shape(
        vocab=VOCAB, layers=settings.layers, width=settings.width, heads=settings.width // 64,
        tied=False, checkpointing=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    with OffloadEngine(
        Decoder(shape), nvme_path=folder, gradient_accumulation_steps=num_micro_steps,
        host_memory=settings.host, placement="disk", overlap="speculate", resume=False,
    ) as engine:  # fmt: skip
        for step in range(WARM_UP + settings.steps):
            tokens = torch.randint(
                VOCAB, (num_micro_steps, 2, 1, settings.seq), generator=generator
            )
            before = engine.metrics.total_read_bytes, engine.metrics.total_write_bytes
            start = time.perf_counter()
            losses = engine.train_batch([(x, y) for x, y in tokens], order=order)
            row = {
                "seconds": time.perf_counter() - start,
                "loss": float(torch.stack(losses).mean()),
            }
            row["read"] = engine.metrics.total_read_bytes - before[0]
            row["write"] = engine.metrics.total_write_bytes - before[1]
            row["memory"] = memory_bytes("self")
            if step >= WARM_UP:
                rows.append(row)
    return {key: median(row[key] for row in rows) for key in rows[0]}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", default=".", help="On the disk under test.")
@click.option("--layers", default=12)
@click.option("--width", default=768)
@click.option("--seq", default=128)
@click.option("--micro-steps", default=8)
@click.option("--steps", default=4)
@click.option("--rounds", default=3)
@click.option("--host", default="768MiB")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
@click.option("--theme", default="layers", help="First word of the result file.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    cases = {
        "one micro-step": (1, "horizontal"),
        "horizontal": (settings.micro_steps, "horizontal"),
        "layer-major": (settings.micro_steps, "layer"),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(settings.rounds):
        for name, (count, order) in cases.items():
            with tempfile.TemporaryDirectory(dir=settings.folder, prefix=".layers-") as folder:
                found[name].append(run(settings, Path(folder), count, order))
    rows = {
        name: {key: median(round_[key] for round_ in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    for name, row in rows.items():
        click.echo(
            f"{name:<15} {row['seconds']:6.2f} s, read {row['read'] / 1e6:8.1f} MB, written"
            f" {row['write'] / 1e6:8.1f} MB, memory {row['memory'] / 1e6:6.0f} MB, loss"
            f" {row['loss']:.6f}"
        )
    moved = {name: row["read"] + row["write"] for name, row in rows.items()}
    share = moved["layer-major"] / moved["one micro-step"]
    pairs = zip(found["layer-major"], found["horizontal"], strict=True)
    faster = median(layer["seconds"] / other["seconds"] for layer, other in pairs)
    click.echo(
        f"{'ok  ' if share <= WANTED_BYTES else 'MISS'} layer-major moves {share:.3f} of the bytes"
        f" of one micro-step, wanted {WANTED_BYTES}; its step takes {faster:.2f} of horizontal"
    )
    if settings.save:
        result = {
            "machine": describe_machine(), "settings": told_settings(settings), "rows": rows,
            "of_one_micro_step": share, "of_horizontal_time": faster, "rounds": found,
        }  # fmt: skip
        click.echo(f"\nwritten: {keep_result(settings.theme, result)}")


if __name__ == "__main__":
    main()
