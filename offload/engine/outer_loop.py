"""What training loops of other libraries ask for between backward and step().

backward(engine, loss, last=...)   a micro-step of a loop that knows where its window ends
grad_norm(engine)                  of what is kept so far: what step() will report
clip_next_step(engine, max_norm)   the factor is applied by the coming step, and by it alone
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine


def backward(engine: OffloadEngine, loss: torch.Tensor, *, last: bool, **kwargs: Any) -> None:
    """Backward of one micro-step; the caller has divided the loss by their number.

    `last`: the step follows, so updates may begin.  The loss scale is applied here.
    """
    engine._check_open()
    hooks = engine._parts.hooks
    hooks.last_micro_step = last
    try:
        engine.scale(loss).backward(**kwargs)
    finally:
        hooks.last_micro_step = engine.config.gradient_accumulation_steps == 1


def grad_norm(engine: OffloadEngine) -> float:
    """Unscaled global norm of the gradients kept since the last step, before any clipping."""
    return engine._parts.stepper.kept_norm()


def clip_next_step(engine: OffloadEngine, max_norm: float) -> None:
    """Clip the gradients of the coming step to a global norm of `max_norm`.

    Where `gradient_clipping` is set too, or another call came before, the smallest holds.
    """
    if not max_norm > 0 or math.isnan(max_norm):
        raise ConfigError(f"max_norm: expected a number above 0, got {max_norm}.")
    stepper = engine._parts.stepper
    if math.isfinite(max_norm):
        stepper.max_norm = min(max_norm, stepper.max_norm or math.inf)


def end_step(engine: OffloadEngine) -> None:
    """Clip as `gradient_clipping` says again: the step was taken, or its gradients dropped."""
    engine._parts.stepper.max_norm = engine.config.gradient_clipping


def in_window(engine: OffloadEngine) -> bool:
    """True between the first micro-step and step() of a window of several that step() counts."""
    config = engine.config
    several = config.managed_gradient_accumulation and config.gradient_accumulation_steps > 1
    return several and engine._micro_steps > 0


def name_of(engine: OffloadEngine) -> str:
    """The name under which its store lies; another engine with it has that store."""
    return engine._parts.ground.blueprint.name


def on_close(engine: OffloadEngine, action: Callable[[], Any]) -> None:
    """Run `action` when `engine` is closed."""
    engine._parts.ground.attached.callback(action)


def compute_dtype(engine: OffloadEngine) -> torch.dtype:
    """The type of gathered weights."""
    return engine._parts.ground.blueprint.compute_dtype


def device(engine: OffloadEngine) -> torch.device:
    """Where the model computes."""
    return engine._parts.ground.blueprint.device


def holds(engine: OffloadEngine, parameter: torch.nn.Parameter) -> bool:
    """True where `engine` is open and `parameter` is its model's."""
    return engine._close.alive and id(parameter) in engine._parts.names_by_id


def tracked(engine: OffloadEngine, name: str) -> Any:
    """The object that `track` has under `name`; None if there is none."""
    return engine._tracked.find(name)


def at_close(engine: OffloadEngine, callback: Callable[[], None]) -> None:
    """Call `callback` when the engine is closed."""
    engine._parts.ground.attached.callback(callback)
