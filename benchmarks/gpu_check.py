"""What a machine with a GPU must show, in one run of a few minutes.

    python benchmarks/gpu_check.py [--folder DIR] [--out FILE]

Runs the GPU tests, then times a step offloaded and in the device's memory, the same model and
batches, interleaved in rounds.  Ends with one JSON object, also written to FILE.  Status 1: a test
failed or there is no CUDA device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from step_model import GPT, Shape, batches

from offload import OffloadEngine

HERE = Path(__file__).resolve().parent


def run_tests() -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        str(HERE.parent / "tests" / "gpu"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return {"status": run.returncode, "tail": run.stdout.splitlines()[-8:]}


def in_memory(shape: Shape) -> Callable[[Any, Any], float]:
    """bf16 weights, fp32 masters, fused AdamW, all on the device."""
    torch.manual_seed(0)
    model = GPT(shape).to("cuda", torch.bfloat16)
    masters = [param.detach().float().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01, fused=True)

    def step(x: Any, y: Any) -> float:
        loss = model(x, y)
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        return float(loss.item())

    return step


def offloaded(shape: Shape, folder: Path) -> tuple[OffloadEngine, Callable[[Any, Any], float]]:
    torch.manual_seed(0)
    model = GPT(shape).to(torch.bfloat16)
    engine = OffloadEngine(
        model, nvme_path=folder, lr=1e-4, weight_decay=0.01, device="cuda", resume=False
    )

    def step(x: Any, y: Any) -> float:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return engine, step


def timed(step: Callable[[Any, Any], float], data: list[Any]) -> tuple[list[float], list[float]]:
    seconds, losses = [], []
    for x, y in data:
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(x, y))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, losses


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="On a local drive.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
@click.option("--rounds", default=3)
@click.option("--steps", default=6)
def main(folder: Path | None, out: Path | None, rounds: int, steps: int) -> None:
    """Run everything; print one JSON object."""
    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA device: nothing was checked.")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tests": run_tests(),
    }
    shape = Shape(width=2048, depth=12, seq=1024)
    data = [(x.cuda(), y.cuda()) for x, y in islice(batches(shape), rounds * steps + 2)]
    with tempfile.TemporaryDirectory(dir=folder) as store:
        memory_step = in_memory(shape)
        engine, offload_step = offloaded(shape, Path(store))
        with engine:
            for step in (memory_step, offload_step):
                timed(step, data[:2])
            ours, theirs = [], []
            for index in range(rounds):
                part = data[2 + index * steps : 2 + (index + 1) * steps]
                theirs.append(timed(memory_step, part))
                ours.append(timed(offload_step, part))
            result["metrics"] = engine.metrics.last
    seconds = {
        name: statistics.median(statistics.median(seconds) for seconds, _ in runs)
        for name, runs in (("offload", ours), ("in_memory", theirs))
    }
    pairs = zip(ours, theirs, strict=True)
    gap = max(abs(a - b) for o, t in pairs for a, b in zip(o[1], t[1], strict=True))
    result |= {
        "parameters": shape.num_params,
        "step_s": seconds,
        "ratio": seconds["offload"] / seconds["in_memory"],
        "largest_loss_difference": gap,
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
    }
    text = json.dumps(result, indent=1, default=str)
    click.echo(text)
    if out:
        out.write_text(text + "\n")
    sys.exit(1 if result["tests"]["status"] else 0)


if __name__ == "__main__":
    main()
