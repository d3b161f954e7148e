"""One process of bench_durability: train, and save a checkpoint now and then.

    python saving_child.py JOB REPORT_FD      JOB as of step_child; `options` has `target`, `every`

Lines as of step_child; a step says whether a checkpoint was being written when it began, how
long the call of `save_checkpoint` took before it, and how many steps ago the last one began.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from meters import CpuSeconds, io_bytes, memory_bytes
from step_child import Job, OffloadEngineUnderTest, import_engine
from step_model import batches


def train(job: Job, target: Path, every: int, report: Callable[..., None]) -> None:
    """Every `every` steps, before the next one, save; the checkpoint before it is removed."""
    start = time.perf_counter()
    engine = OffloadEngineUnderTest(job)
    report("built", seconds=time.perf_counter() - start, io_bytes=io_bytes())
    source, saving, since = batches(job.shape), None, 0
    for index in range(job.steps):
        x, y = next(source)
        cpu, start, call_s = CpuSeconds.now(), time.perf_counter(), 0.0
        if index and index % every == 0:
            saving, since = engine.engine.save_checkpoint(target, keep=1), 0
            call_s = time.perf_counter() - start
        busy = saving is not None and not saving.done()
        loss = engine.step(x, y)
        seconds = time.perf_counter() - start
        spent = CpuSeconds.now().since(cpu)
        read, write = io_bytes()
        report(
            "step", index=index, loss=loss, seconds=seconds, call_s=call_s, saving=busy,
            since=since, read_bytes=read, write_bytes=write, counted={}, **spent,
        )  # fmt: skip
        since += 1
    if saving is not None:
        saving.wait()
    engine.close()


def main() -> None:
    job = Job.parse(sys.argv[1])
    target, every = Path(job.options.pop("target")), int(job.options.pop("every"))
    lines = os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def report(event: str, **values: object) -> None:
        lines.write(json.dumps({"event": event, **values}) + "\n")

    torch.set_num_threads(job.threads)
    report("imported", version=import_engine(job.engine), memory_bytes=memory_bytes())
    train(job, target, every, report)
    report("drained", seconds=0.0)


if __name__ == "__main__":
    main()
