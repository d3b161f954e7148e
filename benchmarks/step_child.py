"""One engine, one process: train some steps and report each as a JSON line.

    python step_child.py JOB REPORT_FD      JOB is a JSON object, see Job

Lines: imported (memory baseline), built, step (one each), drained. Standard output and error are
left to the engines. Runs under the peer's interpreter too, so an engine is imported when chosen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from meters import CpuSeconds, io_bytes, memory_bytes
from step_model import Shape, batches, build
from torch import Tensor

Counters = dict[str, float]
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01


@dataclass(frozen=True)
class Job:
    """What the parent asks for; `options` is for the engine alone."""

    engine: str
    shape: Shape
    steps: int
    folder: str
    threads: int
    lr: float = 1e-4
    clip: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


class TorchEngine:
    """Everything in memory: bf16 weights, fp32 masters, torch's fused AdamW."""

    def __init__(self, job: Job) -> None:
        self._model = build(job.shape)
        self._weights = list(self._model.parameters())
        self._masters = [torch.nn.Parameter(w.detach().float()) for w in self._weights]
        self._clip = job.clip
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=job.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, x: Tensor, y: Tensor) -> float:
        loss = self._model(x, y)
        loss.backward()
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)
                master.grad = None
        return loss.item()

    def counters(self) -> Counters:
        return {}

    def close(self) -> None:
        pass


class OffloadEngineUnderTest:
    """Ours, with parameters and optimizer state in `folder`."""

    def __init__(self, job: Job) -> None:
        from offload import OffloadEngine

        self.engine = OffloadEngine(
            build(job.shape),
            nvme_path=job.folder,
            optimizer="adamw",
            lr=job.lr,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            gradient_clipping=job.clip,
            resume=False,
            **job.options,
        )

    def step(self, x: Tensor, y: Tensor) -> float:
        loss = self.engine(x, y)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def counters(self) -> Counters:
        metrics = self.engine.metrics
        return {
            "read_bytes": metrics.total_read_bytes,
            "write_bytes": metrics.total_write_bytes,
            "stall_s": sum(metrics.stalls.values()),
        }

    def close(self) -> None:
        self.engine.close()


def deepspeed_config(job: Job) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer on NVMe, at the settings that were fastest here."""
    options = job.options
    pipeline = options["pipeline"]
    largest = max(job.shape.vocab * job.shape.width, 4 * job.shape.width**2)
    place = {"device": "nvme", "nvme_path": job.folder, "pin_memory": True}
    optimizer = {
        **place,
        "buffer_count": options["buffer_count"],
        "pipeline_read": pipeline,
        "pipeline_write": pipeline,
    }
    params = {**place, "buffer_count": 8, "buffer_size": max(20_000_000, largest), "max_in_cpu": 0}
    rule = {"lr": job.lr, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": job.shape.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": job.clip,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": rule},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": options["sub_group_size"],
            "stage3_max_live_parameters": options["max_live"],
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "overlap_comm": False,
            "reduce_bucket_size": 50_000_000,
            "offload_optimizer": optimizer,
            "offload_param": params,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


class DeepSpeedEngine:
    """The peer: one rank on the CPU. Its environment (port, rank) is set by the parent."""

    def __init__(self, job: Job) -> None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        model = build(job.shape)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_config(job)
        )

    def step(self, x: Tensor, y: Tensor) -> float:
        loss = self._engine(x, y)
        self._engine.backward(loss)
        self._engine.step()
        return loss.item()

    def counters(self) -> Counters:
        return {}

    def close(self) -> None:
        pass


ENGINES = {
    "torch": TorchEngine,
    "offload": OffloadEngineUnderTest,
    "deepspeed": DeepSpeedEngine,
    "deepspeed-serial": DeepSpeedEngine,
}
Engine = TorchEngine | OffloadEngineUnderTest | DeepSpeedEngine


def import_engine(name: str) -> str:
    """Import what the engine needs, so that the memory baseline includes it; return its version."""
    if name == "offload":
        import offload

        return str(getattr(offload, "__version__", "working tree"))
    if name.startswith("deepspeed"):
        import deepspeed

        return str(deepspeed.__version__)
    return str(torch.__version__)


def train(engine: Engine, job: Job, report: Callable[..., None]) -> None:
    """Run the steps; a step lasts until its loss is known and `step` has returned."""
    source = batches(job.shape)
    for index in range(job.steps):
        x, y = next(source)
        read, write = io_bytes()
        counted = engine.counters()
        cpu, start = CpuSeconds.now(), time.perf_counter()
        loss = engine.step(x, y)
        seconds = time.perf_counter() - start
        spent = CpuSeconds.now().since(cpu)
        read_after, write_after = io_bytes()
        counted_after = engine.counters()
        report(
            "step",
            index=index,
            loss=loss,
            seconds=seconds,
            read_bytes=read_after - read,
            write_bytes=write_after - write,
            counted={key: counted_after[key] - counted[key] for key in counted_after},
            **spent,
        )


def main() -> None:
    job = Job.parse(sys.argv[1])
    lines = os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def report(event: str, **values: object) -> None:
        lines.write(json.dumps({"event": event, **values}) + "\n")

    torch.set_num_threads(job.threads)
    version = import_engine(job.engine)
    report("imported", version=version, torch=torch.__version__, memory_bytes=memory_bytes())
    start = time.perf_counter()
    engine = ENGINES[job.engine](job)
    threads = torch.get_num_threads()
    report("built", seconds=time.perf_counter() - start, io_bytes=io_bytes(), threads=threads)
    train(engine, job, report)
    start = time.perf_counter()
    engine.close()
    report("drained", seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
