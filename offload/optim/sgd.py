"""Stochastic gradient descent with and without momentum, as torch.optim.SGD.

Source of the two momenta: Sutskever et al. 2013, in the form of torch's documentation: the learning
rate scales the buffer, not the gradient that enters it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _offload_native import lib

from offload.errors import ConfigError
from offload.kernels import ROW
from offload.optim.rules import Group, check_flags, check_numbers, new_row, torch_defaults


@dataclass(frozen=True)
class SgdRule:
    """`has_momentum`: some group has momentum, so every parameter has a buffer."""

    has_momentum: bool

    @classmethod
    def of(cls, groups: Sequence[Group]) -> SgdRule:
        """The rule for groups of which some may have momentum."""
        return cls(any(group.get("momentum") for group in groups))

    @property
    def name(self) -> str:
        return "sgd"

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.has_momentum else ()

    @property
    def defaults(self) -> Mapping[str, Any]:
        return torch_defaults(torch.optim.SGD)

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return ROW

    def check(self, group: Group, index: int) -> None:
        """Refuse values out of range, and momentum where the store has no buffers."""
        check_flags(group, index)
        check_numbers(group, index, "lr", "momentum", "weight_decay")
        momentum = float(group["momentum"])
        if momentum and not self.has_momentum:
            raise ConfigError(
                f"param_groups[{index}]: expected momentum 0, as when the engine was made, got"
                f" {momentum}: there are no buffers for it. Set momentum when making the engine."
            )
        if group.get("nesterov") and (not momentum or group.get("dampening")):
            raise ConfigError(
                f"param_groups[{index}]: expected momentum and no dampening with nesterov, got"
                f" momentum {momentum} and dampening {group.get('dampening')}. Change one of them."
            )

    def row(self, group: Group, *, step: int, grad_scale: float) -> Any:
        """A group without momentum keeps its buffers at zero."""
        momentum = float(group["momentum"])
        row = new_row(lib.SIMD_MOMENTUM if self.has_momentum else lib.SIMD_SGD, step, grad_scale)
        row["l2"] = group["weight_decay"]
        row["step_size"] = group["lr"]
        if momentum:
            first = step == 1
            row["beta1"] = 0.0 if first else momentum
            row["one_minus_beta1"] = 1.0 if first else 1.0 - float(group["dampening"])
        if momentum and not group.get("nesterov"):
            row["beta2"] = 1.0
        else:
            row["beta2"], row["one_minus_beta2"] = momentum, 1.0
        return row[()]
