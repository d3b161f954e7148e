"""One process of bench_load: make a store of a saved model, then go through its ways in and out.

    python load_child.py JOB REPORT_FD      JOB is a JSON object, see Job

Each line of the report: what was done, seconds, bytes that the kernel moved for it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # any optimizer of torch imports it: not a part of loading
from meters import io_bytes
from step_model import GPT, Shape, batches

from offload import OffloadEngine


@dataclass(frozen=True)
class Job:
    """What the parent asks for."""

    shape: Shape
    source: str  # a folder with safetensors
    dtype: str  # what moves
    folder: str  # for store, export and checkpoint
    threads: int
    host_memory: str
    device_memory: str
    imports: int  # that are judged
    further: bool  # checkpoint and exports too

    @classmethod
    def parse(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


def measured(report: Callable[..., None], name: str, action: Callable[[], Any]) -> Any:
    """Run `action` and report what it took."""
    read, write = io_bytes()
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    read_after, write_after = io_bytes()
    report(name, seconds=seconds, read_bytes=read_after - read, write_bytes=write_after - write)
    return result


def open_engine(job: Job, folder: Path, *, resume: bool) -> OffloadEngine:
    return OffloadEngine.from_pretrained(
        job.source, make=lambda: GPT(job.shape), nvme_path=folder, resume=resume,
        dtype=job.dtype, host_memory=job.host_memory, device_memory=job.device_memory,
    )  # fmt: skip


def train(engine: OffloadEngine, shape: Shape) -> None:
    """Three steps: all sides of the files are written, moments are not zero, all is committed."""
    source = batches(shape)
    for _ in range(3):
        engine.backward(engine(*next(source)))
        engine.step()


def main() -> None:
    job = Job.parse(sys.argv[1])
    lines = os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def report(event: str, **values: object) -> None:
        lines.write(json.dumps({"event": event, **values}) + "\n")

    torch.set_num_threads(job.threads)
    folder = Path(job.folder)
    # The first is not judged: a virtual machine hands memory out page by page, at 0.5 GB/s.
    for index in range(1 + job.imports):
        drive = folder / f"drive{index}"
        drive.mkdir()
        measured(report, "import", partial(open_engine, job, drive, resume=False)).close()
        engine = measured(report, "open", partial(open_engine, job, drive, resume=True))
        if index < job.imports or not job.further:
            engine.close()
            shutil.rmtree(drive)
    if job.further:
        go_on(job, engine, folder, report)


def go_on(
    job: Job, engine: OffloadEngine, folder: Path, report: Callable[..., None]
) -> None:  # fmt: skip
    """Train, and measure what a trained state offers."""
    train(engine, job.shape)
    engine.save_checkpoint(folder / "checkpoints", "saved").wait()
    checkpoint = folder / "checkpoints"
    measured(report, "load_checkpoint", lambda: engine.load_checkpoint(checkpoint, "saved"))
    measured(report, "export bf16", lambda: engine.export(folder / "bf16", dtype="bf16"))
    measured(report, "export fp32", lambda: engine.export(folder / "fp32", dtype="fp32"))
    engine.close()


if __name__ == "__main__":
    main()
