"""Adam and AdamW.

Sources: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError
from offload.kernels import ADAM_ROW, adam_row
from offload.optim.rules import Group, check_betas, check_flags, check_numbers, torch_defaults


@dataclass(frozen=True)
class AdamRule:
    """Which Adam: weight decay taken from the weight (`decoupled`) or added to the gradient."""

    decoupled: bool
    corrected: bool = True  # divide the moments by 1 - beta^step

    @property
    def name(self) -> str:
        return "adamw" if self.decoupled else "adam"

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def defaults(self) -> Mapping[str, Any]:
        return torch_defaults(torch.optim.AdamW if self.decoupled else torch.optim.Adam)

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return ADAM_ROW

    def check(self, group: Group, index: int) -> None:
        """Refuse amsgrad, and values out of range."""
        check_flags(group, index)
        if group.get("amsgrad"):
            raise ConfigError(
                f"param_groups[{index}]: amsgrad is not available."
                " The running maximum would need a third moment. Leave it off."
            )
        check_numbers(group, index, "lr", "eps", "weight_decay")
        check_betas(group, index)

    def row(self, group: Group, *, step: int, grad_scale: float) -> Any:
        beta1, beta2 = group["betas"]
        row = adam_row(
            float(group["lr"]),
            (float(beta1), float(beta2)),
            float(group["eps"]),
            float(group["weight_decay"]),
            step,
            decoupled=bool(group.get("decoupled_weight_decay", self.decoupled)),
            grad_scale=grad_scale,
        )
        if not self.corrected:
            row["step_size"], row["inv_sqrt_bias2"] = float(group["lr"]), 1.0
        return row
