"""`DeepSpeedEngine`: the calls of a DeepSpeed script, over an `OffloadEngine`.

    loss = engine(batch);  engine.backward(loss);  engine.step()        every micro-step

Everything else it has (metrics, plan, export, gathered, ...) is at `engine.offload`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from torch.utils.data import DataLoader

from offload.deepspeed_config.recipe import Recipe
from offload.engine import outer_loop
from offload.engine.after_step import CsvMonitor
from offload.engine.facade import OffloadEngine
from offload.integrations.deepspeed.numbers import Choices, Numbers
from offload.integrations.deepspeed.refused import Refused
from offload.integrations.deepspeed.saving import Saving


class DeepSpeedEngine(Numbers, Choices, Saving, Refused, nn.Module):
    """A module that runs the model's forward and trains it."""

    def __init__(
        self, offload: OffloadEngine, recipe: Recipe, *, training_dataloader: DataLoader[Any] | None
    ) -> None:
        nn.Module.__init__(self)
        self.offload = offload
        self.recipe = recipe
        self.module = offload.module
        self.optimizer = offload.optimizer
        self.training_dataloader = training_dataloader
        self.lr_scheduler: Any = None
        self.steps_scheduler = False  # the caller's; the file's is stepped by the optimizer
        self.micro_steps = 0
        self._applied = False  # what the last step() did
        self._losses: list[float] = []  # of the micro-steps since the last update
        self._csv = CsvMonitor(recipe.csv) if recipe.csv is not None else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.offload(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of one micro-step; returns the loss as it was scaled for accumulation.

        `scale_wrt_gas` False: the caller has divided it by the number of micro-steps.
        """
        steps = self.gradient_accumulation_steps()
        whole = loss if scale_wrt_gas else loss * steps
        self.offload.backward(whole, **({"retain_graph": True} if retain_graph else {}))
        if self._csv is not None:
            self._losses.append(float(whole.detach()))
        return loss / steps if scale_wrt_gas else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update at the boundary of accumulation, and step the scheduler unless it was skipped."""
        before = self.offload.global_step
        self.offload.step()
        self.micro_steps += 1
        self._applied = self.offload.global_step > before
        if not self._applied:
            return
        if self.steps_scheduler:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        if self._csv is not None and self._losses:
            mean = sum(self._losses) / len(self._losses)
            self._csv.write(self.global_samples, {"train_loss": mean})
        self._losses.clear()

    def was_step_applied(self) -> bool:
        """True where the last step() updated: at a boundary, and not skipped."""
        return self._applied

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, of a micro-step, and micro-steps."""
        micro = self.train_micro_batch_size_per_gpu()
        return self.train_batch_size(), micro, self.gradient_accumulation_steps()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget kept gradients, but not those of an accumulation window that has begun.

        Scripts call it in every micro-step: there it has no effect, as in DeepSpeed, which keeps
        them apart from `p.grad`.  step() has forgotten its own.
        """
        if not outer_loop.in_window(self.offload):
            self.offload.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """What the wrapped model has, such as `generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def close(self) -> None:
        """Finish, commit, release; may be called twice."""
        self.offload.close()

    destroy = close  # its name there

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.offload.__exit__(kind, *exc)
