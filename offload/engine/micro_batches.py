"""`train_batch`: all micro-steps of one step, one after another or unit by unit.

Each micro-batch has a stream of random numbers of its own in either order, so the order changes no
number: dropout included, where a model draws from torch's own generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from offload.config import ORDERS
from offload.errors import ConfigError
from offload.runtime import random_state
from offload.runtime.baton import draw_seeds

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine

LossOf = Callable[[Callable[..., Any], Any], torch.Tensor]  # of a model and a batch


def train_batch(
    engine: OffloadEngine, batches: Sequence[Any], loss_fn: Callable[[Any], torch.Tensor] | None,
    order: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Run the micro-steps and step; the losses, detached."""
    wanted = engine.config.gradient_accumulation_steps
    if len(batches) != wanted:
        raise ConfigError(
            f"train_batch: expected {wanted} batches, gradient_accumulation_steps, got"
            f" {len(batches)}."
        )
    if order not in ORDERS:
        raise ConfigError(f"train_batch: expected order {' or '.join(ORDERS)}, got {order!r}.")
    run = _by_layers if order == "layer" and len(batches) > 1 else _one_by_one
    seeds = draw_seeds(len(batches))
    after = random_state.capture()
    try:
        losses = run(engine, batches, partial(_loss_of, loss_fn), seeds)
    finally:
        random_state.restore(after)
    engine.step()
    return [loss.detach() for loss in losses]


def _loss_of(
    loss_fn: Callable[[Any], torch.Tensor] | None, model: Callable[..., Any], batch: Any
) -> torch.Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    found = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ConfigError(
            "train_batch: expected the model to return its loss, or an output with `.loss`, got"
            f" {type(output).__name__}. Pass loss_fn."
        )
    return found


def _one_by_one(
    engine: OffloadEngine, batches: Sequence[Any], loss_of: LossOf, seeds: Sequence[int]
) -> list[torch.Tensor]:
    losses = []
    for batch, seed in zip(batches, seeds, strict=True):
        random_state.restore(random_state.seeded(seed))
        loss = loss_of(engine, batch)
        engine.backward(loss)
        losses.append(loss)
    return losses


def _by_layers(
    engine: OffloadEngine, batches: Sequence[Any], loss_of: LossOf, seeds: Sequence[int]
) -> list[torch.Tensor]:
    hooks, metrics = engine._parts.hooks, engine._parts.ground.metrics
    losses: dict[int, torch.Tensor] = {}

    def call(index: int) -> torch.Tensor:
        losses[index] = loss_of(engine.module, batches[index])
        return engine.scale(losses[index] / len(batches))

    try:
        with metrics.phase("forward"):
            calls = [partial(call, index) for index in range(len(batches))]
            scaled = hooks.forward_by_layers(engine.module, calls, seeds)
        hooks.last_micro_step = True
        with metrics.phase("backward"):
            torch.autograd.backward(scaled)
    except BaseException:
        hooks.abort()
        raise
    finally:
        hooks.last_micro_step = False
    engine._micro_steps = len(batches)
    return [losses[index] for index in range(len(batches))]
