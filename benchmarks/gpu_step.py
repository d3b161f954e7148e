"""One part of gpu_check.py, in a process of its own.

    python gpu_step.py JOB OUT      JOB is a JSON object, see Job; OUT gets another one

`machine` tells what is there.  `memory` trains in the device's memory, `offload` with the engine:
the same weights and batches.  After the timed steps two are profiled: how much of the copies in
and out ran while kernels did.  OUT is written after each of these, so that what a
limit cuts off is the rest.  The store is thrown away afterwards: nothing is written at the end.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from step_model import Shape, batches, build

LANES = {"kernel": "kernels", "HtoD": "copies in", "DtoH": "copies out"}
COLUMNS = 72
Span = tuple[float, float]
Step = Callable[[Any, Any], float]


@dataclass(frozen=True)
class Job:
    """What is asked for; `settings` are the engine's."""

    part: str  # machine, memory or offload
    device: str = "cuda"
    shape: Shape = field(default_factory=Shape)
    steps: int = 8
    warmup: int = 2
    folder: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    trace: str = ""

    @classmethod
    def parse(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields.get("shape", {}))})


def machine() -> dict[str, Any]:
    """Versions and sizes; fails where the engine cannot be imported."""
    from offload import kernels

    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)), "kernels": kernels.variant(),
        "cuda": torch.version.cuda, "device": None,
    }  # fmt: skip
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"device": torch.cuda.get_device_name(), "free": free, "memory": total}
    return found


def in_memory(job: Job) -> Step:
    """bf16 weights, fp32 masters, fused AdamW, all on the device."""
    model = build(job.shape).to(job.device)
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


def offloaded(job: Job, found: dict[str, Any]) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """The engine's step, and what it tells of itself afterwards."""
    from offload import OffloadEngine

    engine = OffloadEngine(
        build(job.shape), nvme_path=job.folder, lr=1e-4, weight_decay=0.01, device=job.device,
        resume=False, **job.settings,
    )  # fmt: skip
    found["description"] = engine.describe().splitlines()

    def step(x: Any, y: Any) -> float:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    def told() -> dict[str, Any]:
        plan = str(engine.plan).splitlines()
        peak = engine.plan.device_peak
        return {"metrics": engine.metrics.last, "plan": plan, "planned_peak": peak}

    return step, told


def train(job: Job, keep: Callable[[dict[str, Any]], None]) -> None:
    """Time steps, then profile two more; `keep` what is known so far."""
    found: dict[str, Any] = {"parameters": job.shape.num_params, "tokens": job.shape.tokens}
    start = time.perf_counter()
    told: Callable[[], dict[str, Any]] = dict
    if job.part == "memory":
        step = in_memory(job)
    else:
        step, told = offloaded(job, found)
    found["built_s"] = time.perf_counter() - start
    keep(found)
    data = [
        (x.to(job.device), y.to(job.device))
        for x, y in islice(batches(job.shape), job.warmup + job.steps)
    ]
    timed(job, step, data[: job.warmup])
    seconds, losses = timed(job, step, data[job.warmup :])
    found |= {"step_s": statistics.median(seconds), "steps_s": seconds, "losses": losses, **told()}
    if job.device != "cpu":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    keep(found)
    if job.trace:
        found["copies"] = profiled(job, step, data[-2:])
        keep(found)


def timed(job: Job, step: Step, data: Iterable[tuple[Any, Any]]) -> tuple[list[float], list[float]]:
    seconds, losses = [], []
    for x, y in data:
        synchronize(job)
        start = time.perf_counter()
        losses.append(step(x, y))
        synchronize(job)
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def synchronize(job: Job) -> None:
    if job.device != "cpu":
        torch.cuda.synchronize()


def profiled(job: Job, step: Step, data: list[Any]) -> dict[str, Any]:
    """Run steps under torch's profiler; leave its trace, tell what copies did beside kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if job.device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        timed(job, step, data)
    profile.export_chrome_trace(job.trace)
    return overlap(json.loads(Path(job.trace).read_text())["traceEvents"])


def overlap(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of kernels and of copies, the share of each beside kernels, and a picture."""
    spans: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        name = "kernel" if event["cat"] == "kernel" else event["name"]
        lane = next((each for each in LANES if each in name), None)
        if lane is not None:
            start = float(event["ts"])
            spans[lane].append((start, start + float(event.get("dur", 0))))
    lanes = {lane: merged(found) for lane, found in spans.items()}
    told: dict[str, Any] = {"kernel_s": total(lanes["kernel"]) * 1e-6}
    for direction in ("HtoD", "DtoH"):
        copies = lanes[direction]
        both = total(shared(copies, lanes["kernel"]))
        told[f"{direction}_s"] = total(copies) * 1e-6
        told[f"{direction}_beside_kernels"] = both / total(copies) if copies else 0.0
    return told | {"picture": picture(lanes)}


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, in order."""
    union: list[Span] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union


def shared(one: list[Span], other: list[Span]) -> list[Span]:
    """What two unions have in common."""
    found, at = [], 0
    for start, stop in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        each = at
        while each < len(other) and other[each][0] < stop:
            found.append((max(start, other[each][0]), min(stop, other[each][1])))
            each += 1
    return found


def total(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def picture(lanes: dict[str, list[Span]]) -> list[str]:
    """A line for each lane: how busy it was, from the first event to the last."""
    ends = [end for spans in lanes.values() for span in spans for end in span]
    if not ends:
        return []
    first, width = min(ends), (max(ends) - min(ends)) / COLUMNS
    cells = [(first + column * width, first + (column + 1) * width) for column in range(COLUMNS)]
    lines = []
    for lane, spans in lanes.items():
        shares = [total(shared([cell], spans)) / width for cell in cells]
        marks = "".join(" .:*#"[min(int(share * 5), 4)] for share in shares)
        lines.append(f"{LANES[lane]:10} |{marks}|")
    return lines


def main() -> None:
    job, out = Job.parse(sys.argv[1]), Path(sys.argv[2])

    def keep(found: dict[str, Any]) -> None:
        part = out.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1, default=str) + "\n")
        part.replace(out)

    if job.part == "machine":
        keep(machine())
    else:
        train(job, keep)
    sys.stdout.flush()
    os._exit(0)  # the store goes away: closing it would write what only memory holds


if __name__ == "__main__":
    main()
