"""The factor that keeps small gradients above the least fp16 number, fixed or found by trying.

    loss * scale --backward--> gradients * scale --update--> gradients    (unscaling: grad_scale)

    a gradient overflows    the step is skipped; the scale halves, once `hysteresis` did
    `window` steps did not  the scale doubles

The rules are those of DeepSpeed's `DynamicLossScaler`; with hysteresis=1 they are those of
`torch.amp.GradScaler` with growth 2, backoff 0.5 and growth_interval=window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.config import EngineConfig
from offload.errors import StateError

_FACTOR = 2.0


class LossScale:
    """The scale of one engine; changed by `update` alone."""

    def __init__(self, config: EngineConfig) -> None:
        """Without fp16 the scale is 1 and stays."""
        self.enabled = config.dtype is torch.float16
        self.dynamic = self.enabled and not config.loss_scale
        self._window = config.loss_scale_window
        self._hysteresis = config.hysteresis
        self._consecutive = config.consecutive_hysteresis
        self._least = config.min_loss_scale
        first = config.loss_scale or max(2.0**config.initial_scale_power, self._least)
        self.value = float(first) if self.enabled else 1.0
        self._good_steps = 0  # since the last overflow or growth
        self._left = config.hysteresis  # overflows until the scale halves
        self._applied = False  # to a loss whose gradients have come in this step

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on, in fp32; without fp16 it is `loss`."""
        if not self.enabled:
            return loss
        scaled = loss.float() * self.value
        if scaled.requires_grad:
            scaled.register_hook(self._note)
        return scaled

    @property
    def factor(self) -> float | None:
        """What kept gradients are multiplied by; None without fp16."""
        return self.value if self.enabled else None

    def _note(self, grad: torch.Tensor) -> None:
        self._applied = True

    def check_applied(self) -> None:
        """Raise StateError where gradients have come and no loss was scaled."""
        if self.enabled and not self._applied:
            raise StateError(
                "step: expected gradients of a scaled loss with dtype=float16, got a loss that was"
                " not. Use engine.backward(loss), or engine.scale(loss).backward(); or"
                " loss_scale=1."
            )

    def forget(self) -> None:
        """The step's gradients are gone."""
        self._applied = False

    def update(self, *, overflow: bool) -> None:
        """Follow a step; raises StateError where a gradient overflows at the least scale."""
        if not self.dynamic:
            return
        if overflow:
            self._after_overflow()
            return
        self._good_steps += 1
        if self._consecutive:
            self._left = self._hysteresis
        if self._good_steps % self._window == 0:
            self._left = self._hysteresis
            self.value *= _FACTOR

    def _after_overflow(self) -> None:
        self._good_steps = 0
        if self._left > 1:
            self._left -= 1
        elif self.value == self._least:
            raise StateError(
                f"loss scale: expected finite gradients at the least scale, {self._least:g}, got"
                " Inf or NaN. The weights are as before the step: lower the learning rate, look at"
                " the batch, or use dtype=torch.bfloat16."
            )
        else:
            self.value = max(self.value / _FACTOR, self._least)

    def state_dict(self) -> dict[str, Any]:
        """What belongs to a generation; nothing where nothing changes."""
        if not self.dynamic:
            return {}
        return {"value": self.value, "good_steps": self._good_steps, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a generation; what it does not tell, and a fixed scale, stay."""
        if self.dynamic and state:
            self.value, self._good_steps = state["value"], state["good_steps"]
            self._left = min(state["left"], self._hysteresis)
