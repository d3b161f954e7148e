"""What a machine with a GPU must show, in one run of a few minutes.

    python benchmarks/gpu_check.py [--folder DIR] [--out FILE] [--trace FILE]

Runs the GPU tests (clip rates and an Inf on every placement among them), then times a step
offloaded and in the device's memory, the same model and batches, interleaved in rounds.  Then two
steps are profiled: how much of the copies in and out ran while kernels did; `--trace` keeps their
timeline for Perfetto, `--timeline` the engine's own.  Ends with one JSON object, also written to
FILE.  Status 1: a test failed or there is no CUDA device.
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


def offloaded(
    shape: Shape, folder: Path, timeline: Path | None
) -> tuple[OffloadEngine, Callable[[Any, Any], float]]:
    torch.manual_seed(0)
    model = GPT(shape).to(torch.bfloat16)
    engine = OffloadEngine(
        model, nvme_path=folder, lr=1e-4, weight_decay=0.01, device="cuda", resume=False,
        timeline_path=timeline,
    )  # fmt: skip

    def step(x: Any, y: Any) -> float:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return engine, step


def profiled(step: Callable[[Any, Any], float], data: list[Any], trace: Path) -> dict[str, float]:
    """Run some steps under torch's profiler; leave its trace, return what copies did beside it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        timed(step, data)
    profile.export_chrome_trace(str(trace))
    return overlap(json.loads(trace.read_text())["traceEvents"])


def overlap(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of kernels and of copies by direction, and the share of each beside kernels."""
    spans: dict[str, list[tuple[float, float]]] = {"kernels": [], "HtoD": [], "DtoH": []}
    for event in events:
        span = (float(event.get("ts", 0)), float(event.get("ts", 0)) + float(event.get("dur", 0)))
        if event.get("cat") == "kernel":
            spans["kernels"].append(span)
        elif event.get("cat") == "gpu_memcpy":
            for direction in ("HtoD", "DtoH"):
                if direction in event["name"]:
                    spans[direction].append(span)
    kernels = merged(spans["kernels"])
    told = {"kernel_s": sum(stop - start for start, stop in kernels) * 1e-6}
    for direction in ("HtoD", "DtoH"):
        copies = merged(spans[direction])
        total = sum(stop - start for start, stop in copies)
        both = sum(
            max(min(stop, end) - max(start, begin), 0.0)
            for start, stop in copies
            for begin, end in kernels
        )
        told[f"{direction}_s"] = total * 1e-6
        told[f"{direction}_beside_kernels"] = both / total if total else 0.0
    return told


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, in order."""
    union: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union


def timed(step: Callable[[Any, Any], float], data: list[Any]) -> tuple[list[float], list[float]]:
    seconds, losses = [], []
    for x, y in data:
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(x, y))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def compare(
    shape: Shape, store: Path, *, rounds: int, steps: int, trace: Path | None,
    timeline: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Time both in rounds, profile ours; seconds, losses, copies, the engine's own account."""
    data = [(x.cuda(), y.cuda()) for x, y in islice(batches(shape), rounds * steps + 3)]
    memory_step = in_memory(shape)
    engine, offload_step = offloaded(shape, store, timeline)
    with engine:
        for step in (memory_step, offload_step):
            timed(step, data[:2])
        ours, theirs = [], []
        for index in range(rounds):
            part = data[2 + index * steps : 2 + (index + 1) * steps]
            theirs.append(timed(memory_step, part))
            ours.append(timed(offload_step, part))
        metrics = engine.metrics.last
        copies = profiled(offload_step, data[:2], trace or store / "trace.json")
    seconds = {
        name: statistics.median(statistics.median(seconds) for seconds, _ in runs)
        for name, runs in (("offload", ours), ("in_memory", theirs))
    }
    pairs = zip(ours, theirs, strict=True)
    return {
        "metrics": metrics,
        "copies": copies,
        "step_s": seconds,
        "ratio": seconds["offload"] / seconds["in_memory"],
        "largest_loss_difference": max(
            abs(a - b) for o, t in pairs for a, b in zip(o[1], t[1], strict=True)
        ),
    }


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="On a local drive.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
@click.option("--trace", type=click.Path(path_type=Path), default=None, help="Of the profiler.")
@click.option("--timeline", type=click.Path(path_type=Path), default=None, help="The engine's.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=6, show_default=True)
@click.option("--width", default=2048, show_default=True)
@click.option("--depth", default=12, show_default=True)
@click.option("--seq", default=1024, show_default=True)
def main(folder: Path | None, out: Path | None, **options: Any) -> None:
    """Run everything; print one JSON object."""
    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA device: nothing was checked.")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tests": run_tests(),
    }
    shape = Shape(**{name: options.pop(name) for name in ("width", "depth", "seq")})
    with tempfile.TemporaryDirectory(dir=folder) as store:
        result |= compare(shape, Path(store), **options)
    result |= {
        "parameters": shape.num_params,
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
    }
    text = json.dumps(result, indent=1, default=str)
    click.echo(text)
    if out:
        out.write_text(text + "\n")
    sys.exit(1 if result["tests"]["status"] else 0)


if __name__ == "__main__":
    main()
