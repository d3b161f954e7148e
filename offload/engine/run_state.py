"""What a generation holds beside the tensors in the store: captured, checked and put back.

capture_state(engine) --encode--> payload of the commit --decode--> check_state, restore
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from offload.engine.connect import module_buffers
from offload.engine.generation import (
    capture_groups,
    capture_rng,
    check_groups,
    decode,
    restore_groups,
    restore_rng,
)
from offload.errors import StateError
from offload.interchange.deepspeed import ZeroCheckpoint

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine


def capture_state(engine: OffloadEngine) -> dict[str, Any]:
    """The engine's state as it is now, for a commit."""
    return {
        "global_step": engine.global_step,
        "counts": engine._parts.counts.state_dict(),
        "loss_scale": engine._parts.scale.state_dict(),
        "groups": capture_groups(engine.optimizer.param_groups),
        "rng": capture_rng(),
        "buffers": module_buffers(engine.module),
        "tracked": engine._tracked.capture(),
        "model": engine._notes.encode(),
    }


def check_state(engine: OffloadEngine, saved: Mapping[str, Any]) -> None:
    """Raise StateError where a state cannot be put back into this engine."""
    if saved["groups"] is not None:
        check_groups(engine.optimizer.param_groups, saved["groups"])
    buffers = dict(engine.module.named_buffers())
    for name in buffers.keys() | saved["buffers"].keys():
        shapes = [tuple(x[name].shape) if name in x else None for x in (buffers, saved["buffers"])]
        if shapes[0] != shapes[1]:
            raise StateError(
                f"buffer {name!r}: expected shape {shapes[0]} as in the model, got {shapes[1]}."
                " Build the model as it was built for the saved state."
            )


def resume(engine: OffloadEngine) -> None:
    """Put back the state of the committed generation, if it has one."""
    record = engine._parts.ground.store.committed
    if record is None or not record.payload:
        return
    saved = decode(record.payload)
    check_state(engine, saved)
    restore(engine, saved)


def adopt_zero(
    engine: OffloadEngine, checkpoint: ZeroCheckpoint, found: Mapping[str, str]
) -> dict[str, Any]:
    """Take over what is not in the store; return the state of the generation."""
    engine._micro_steps = 0
    engine.grad_norm = None
    engine.global_step = checkpoint.global_steps
    counts = {name: checkpoint.step_count(other) for name, other in found.items()}
    engine._parts.counts.load_state_dict({name: count for name, count in counts.items() if count})
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if name in checkpoint.buffers:
                buffer.copy_(checkpoint.buffers[name])
    return capture_state(engine)


def restore(engine: OffloadEngine, saved: Mapping[str, Any]) -> None:
    """Put back everything that is not in the store."""
    engine._micro_steps = 0
    engine.grad_norm = None
    engine.global_step = saved["global_step"]
    engine._parts.counts.load_state_dict(saved["counts"])
    engine._parts.scale.load_state_dict(saved.get("loss_scale", {}))
    engine._saved_groups = saved["groups"]
    if saved["groups"] is not None:  # None: the store was made by an import
        restore_groups(engine.optimizer.param_groups, saved["groups"])
    engine._tracked.restore(saved["tracked"])
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(saved["buffers"][name])
    if saved["rng"] is not None:
        restore_rng(saved["rng"])
