"""The peers' updates as calls on the memory that updates are timed on; knows only torch.

DeepSpeed's environment has no `offload`, so that memory comes from its file, not its package.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

FILE = Path(__file__).resolve().parent.parent / "offload" / "cli" / "update_memory.py"
_spec = importlib.util.spec_from_file_location("update_memory", FILE)
assert _spec is not None
assert _spec.loader is not None
memory = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(memory)
PAUSE_S, Job, Streams, Timing = memory.PAUSE_S, memory.Job, memory.Streams, memory.Timing


def _parameter(streams: Streams) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(streams.weight)
    parameter.grad = streams.grad
    return parameter


def _with_casts(streams: Streams, step: Job) -> Job:
    """The same in mixed precision: the gradient comes as bf16, the weight is needed as bf16."""

    def job() -> None:
        streams.grad.copy_(streams.grad16)
        step()
        streams.weight16.copy_(streams.weight)

    return job


def torch_jobs(streams: Streams) -> dict[str, Job]:
    parameter = _parameter(streams)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(5.0),
        "exp_avg": streams.exp_avg,
        "exp_avg_sq": streams.exp_avg_sq,
    }
    return {
        "torch fused, fp32": optimizer.step,
        "torch fused, mixed": _with_casts(streams, optimizer.step),
    }


def deepspeed_jobs(streams: Streams) -> dict[str, Job]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = _parameter(streams)
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.01)
    optimizer.state[parameter] = {
        "step": 5,
        "exp_avg": streams.exp_avg,
        "exp_avg_sq": streams.exp_avg_sq,
    }
    return {
        "deepspeed, fp32": optimizer.step,
        "deepspeed, mixed": _with_casts(streams, optimizer.step),
    }
