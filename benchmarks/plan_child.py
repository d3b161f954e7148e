"""One run of bench_plan: train some steps and report what they took, as one JSON object.

    python plan_child.py JOB REPORT_FD      JOB is a JSON object, see Job

host      resident bytes of the pool, asked of the kernel
device    most bytes of weights and gradients that were there at once (device_meter.py)
disk      blocks of the store's files
moved     bytes read and written a step, by the kernel's count
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import plan_models
import torch
from device_meter import DeviceMeter
from meters import CpuSeconds, io_bytes

from offload import OffloadEngine


@dataclass(frozen=True)
class Job:
    """What the parent asks for."""

    model: str
    folder: str
    tokens: int  # of a step
    seq: int
    warm_up: int
    steps: int
    settings: dict[str, Any]


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of this range that are in memory."""
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages)
    if found:
        raise OSError(ctypes.get_errno(), "mincore")
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def device_peak(engine: OffloadEngine, vocab: int) -> int:
    """Of the first two steps, with short sequences: their activations have no parameter's shape."""
    with DeviceMeter(engine) as meter:
        for _ in range(2):
            engine.train_batch(
                batches_of(vocab, (engine.config.gradient_accumulation_steps, 1, 48))
            )
    return meter.peak


def batches_of(vocab: int, shape: tuple[int, int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and those that follow, for each micro-step."""
    return [(tokens, tokens.roll(-1, 1)) for tokens in torch.randint(vocab, shape)]


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.manual_seed(0)
    model = getattr(plan_models, job.model)()
    vocab, count = model.shape.vocab, job.settings.get("gradient_accumulation_steps", 1)
    shape = (count, job.tokens // count // job.seq, job.seq)
    rows, terms = [], []
    with OffloadEngine(model, nvme_path=job.folder, resume=False, **job.settings) as engine:
        device = device_peak(engine, vocab)
        for _ in range(job.warm_up + job.steps):
            batches = batches_of(vocab, shape)
            before, cpu = io_bytes(), CpuSeconds.now()
            engine.train_batch(batches)
            after, last = io_bytes(), engine.metrics.last
            spent = CpuSeconds.now().since(cpu)
            rows.append(
                {
                    "seconds": last["total_s"], "read": after[0] - before[0],
                    "written": after[1] - before[1], **spent,
                }
            )  # fmt: skip
            terms.append({**last["bound"]["terms"], **last["busy"], **last["seconds"]})
        slab = engine._parts.ground.memory.slab
        found = {
            "host": resident_bytes(slab.buffer.address, slab.num_bytes),
            "device": device,
            "disk": disk_bytes(engine._parts.ground.store.folders[0]),
            **{key: median(row[key] for row in rows[job.warm_up :]) for key in rows[0]},
            "all_seconds": [row["seconds"] for row in rows],
            "terms": {
                key: median(term.get(key, 0.0) for term in terms[job.warm_up :])
                for key in terms[-1]
            },
        }
    with os.fdopen(int(sys.argv[2]), "w") as report:
        json.dump(found, report)


if __name__ == "__main__":
    main()
