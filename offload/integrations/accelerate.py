"""accelerate's loop around an engine.

    engine = OffloadEngine(model, ..., gradient_accumulation_steps=4)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer = attach(accelerator, engine)
    loader, scheduler = accelerator.prepare(loader, scheduler)
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step();  scheduler.step();  optimizer.zero_grad()

What would find no gradients, or save no weights, is replaced on the accelerator: `backward`,
`clip_grad_norm_`, `clip_grad_value_`, and hooks of `save_state` and `load_state`.  Closing the
engine undoes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.folder import find
from offload.checkpoint.load import open_checkpoint
from offload.engine import outer_loop
from offload.engine.facade import OffloadEngine
from offload.errors import ConfigError, StateError

_REPLACED = ("backward", "clip_grad_norm_", "clip_grad_value_")
STATE = "offload"  # the folder with the engine's state inside a checkpoint of another library


def attach(accelerator: Any, engine: OffloadEngine) -> tuple[nn.Module, Any]:
    """Let `accelerator` drive `engine`; return the model and the optimizer, prepared.

    The engine divides no loss and clips only what it is told: its `gradient_accumulation_steps`
    says how much room gradients get.  Raises ConfigError where the accelerator has mixed
    precision of its own (types are the engine's: `dtype=`), or spreads over several processes.
    """
    _check(accelerator)
    model = engine.module
    model._is_accelerate_prepared = True  # type: ignore[assignment]  # to() would find no data
    prepared, optimizer = accelerator.prepare(model, engine.optimizer)
    loop = AcceleratedLoop(accelerator, engine)
    before = {name: vars(accelerator).get(name) for name in _REPLACED}
    for name in _REPLACED:
        setattr(accelerator, name, getattr(loop, name))
    handles = [
        accelerator.register_save_state_pre_hook(loop.save),
        accelerator.register_load_state_pre_hook(loop.load),
        engine.optimizer.register_step_post_hook(loop.after_step),
    ]
    outer_loop.on_close(engine, lambda: _detach(accelerator, engine, before, handles))
    return prepared, optimizer


def _detach(
    accelerator: Any, engine: OffloadEngine, before: dict[str, Any], handles: list[Any]
) -> None:
    """Give the accelerator its own methods back."""
    for handle in handles:
        handle.remove()
    for name, method in before.items():
        if method is None:
            del vars(accelerator)[name]
        else:
            setattr(accelerator, name, method)
    engine.module._is_accelerate_prepared = False  # type: ignore[assignment]


def _check(accelerator: Any) -> None:
    precision = "fp16" if accelerator.scaler is not None else accelerator.mixed_precision
    if precision != "no":
        short = precision if precision in ("bf16", "fp16") else "bf16"
        raise ConfigError(
            f"accelerator: expected mixed_precision='no', got {precision!r}: the engine has types"
            f" of its own, and scales losses by itself. Make OffloadEngine(..., dtype={short!r})"
            " and leave mixed_precision out (Accelerator(mixed_precision='no'))."
        )
    if accelerator.num_processes > 1 or accelerator.distributed_type.value != "NO":
        raise ConfigError(
            f"accelerator: expected one process, got {accelerator.num_processes} of type"
            f" {accelerator.distributed_type.value}. Start the script without a launcher."
        )


class AcceleratedLoop:
    """What an accelerator's methods become; one engine."""

    def __init__(self, accelerator: Any, engine: OffloadEngine) -> None:
        self._accelerator = accelerator
        self._engine = engine
        self._clip_others = accelerator.clip_grad_norm_
        self._clip_values_of_others = accelerator.clip_grad_value_
        self._skipped_before = engine.skipped_steps

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """One micro-step; divides by the accelerator's number of them, as accelerate does."""
        outer_loop.backward(
            self._engine, loss / self._accelerator.gradient_accumulation_steps,
            last=self._accelerator.sync_gradients, **kwargs,
        )  # fmt: skip

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor | None:  # fmt: skip
        """Return the global norm before clipping; the coming step clips to `max_norm`."""
        asked = _listed(parameters)
        if not self._ours(asked, "clip_grad_norm_"):
            found: torch.Tensor | None = self._clip_others(asked, max_norm, norm_type=norm_type)
            return found
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_: expected norm_type=2, got {norm_type}, which the engine does"
                " not compute."
            )
        if not self._accelerator.sync_gradients:
            raise StateError(
                "clip_grad_norm_: expected a call where accelerator.sync_gradients is true, got one"
                " inside an accumulation window. Put it under `if accelerator.sync_gradients:`."
            )
        norm = outer_loop.grad_norm(self._engine)
        outer_loop.clip_next_step(self._engine, float(max_norm))
        return torch.tensor(norm)

    def clip_grad_value_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, clip_value: float
    ) -> None:
        """Refuse: the engine clips by the global norm only."""
        asked = _listed(parameters)
        if self._ours(asked, "clip_grad_value_"):
            raise StateError(
                "clip_grad_value_: the engine keeps the gradients and clips them by their global"
                " norm only. Use accelerator.clip_grad_norm_."
            )
        self._clip_values_of_others(asked, clip_value)

    def _ours(self, asked: list[nn.Parameter], what: str) -> bool:
        """True for all trainable parameters of the engine, False for others' only."""
        ours = {id(p) for p in self._engine.module.parameters() if p.requires_grad}
        found = {id(p) for p in asked if p.requires_grad}
        if ours == found:
            return True
        if not ours & found:
            return False
        raise ConfigError(
            f"{what}: expected all {len(ours)} trainable parameters of the engine's model and no"
            f" others, got {len(ours & found)} of them and {len(found - ours)} others. Pass"
            " model.parameters()."
        )

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Tell accelerate whether the step was skipped: schedulers wait then."""
        skipped = self._engine.skipped_steps
        for each in self._accelerator._optimizers:
            if each.optimizer is optimizer:
                each._is_overflow = skipped > self._skipped_before
        self._skipped_before = skipped

    def save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """`save_state`: weights and optimizer state as the engine keeps them, exact."""
        save_engine(self._engine, Path(folder))
        for index in [i for i, model in enumerate(models) if model is self._engine.module]:
            weights.pop(index)

    def load(self, models: list[nn.Module], folder: str) -> None:
        """`load_state`: go on from what `save` wrote; accelerate loads the rest."""
        load_engine(self._engine, Path(folder))
        models[:] = [model for model in models if model is not self._engine.module]


def save_engine(engine: OffloadEngine, folder: Path) -> None:
    """Save the engine's state beside another library's files; returns when it is complete."""
    engine.save_checkpoint(folder, STATE).wait()


def has_engine(folder: Path) -> bool:
    """True when `save_engine` wrote into `folder`."""
    return (folder / STATE).is_dir()


def load_engine(engine: OffloadEngine, folder: Path) -> None:
    """Load what `save_engine` wrote; raises StateError where there is nothing."""
    check_engine(folder)
    engine.load_checkpoint(folder, STATE)


def check_engine(folder: Path) -> None:
    """Raise StateError unless `save_engine` wrote into `folder`."""
    if not has_engine(folder):
        raise StateError(
            f"checkpoint {folder}: expected a folder {STATE!r} with the engine's state, got none."
            " It was saved without the engine, or with weights only; load those into the model"
            " before the engine is made."
        )


def check_complete(folder: Path) -> None:
    """Raise StoreError or StoreCorrupt unless what `save_engine` wrote is whole; reads no data."""
    found = find(folder, STATE)
    assert found is not None  # find raises for a tag that is not there
    open_checkpoint(found)


def _listed(parameters: Iterable[nn.Parameter] | nn.Parameter) -> list[nn.Parameter]:
    return [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
