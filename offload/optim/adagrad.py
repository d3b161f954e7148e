"""Adagrad, as torch.optim.Adagrad; a group's own `initial_accumulator_value` counts.

Source: Duchi, Hazan and Singer 2011.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _offload_native import lib

from offload.kernels import ROW
from offload.optim.rules import Group, check_flags, check_numbers, new_row, torch_defaults


@dataclass(frozen=True)
class AdagradRule:
    """One state, the sum of squares; its initial value enters with the first update."""

    @property
    def name(self) -> str:
        return "adagrad"

    @property
    def states(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def defaults(self) -> Mapping[str, Any]:
        return torch_defaults(torch.optim.Adagrad)

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return ROW

    def check(self, group: Group, index: int) -> None:
        check_flags(group, index)
        keys = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value")
        check_numbers(group, index, *keys)

    def row(self, group: Group, *, step: int, grad_scale: float) -> Any:
        row = new_row(lib.SIMD_ADAGRAD, step, grad_scale)
        first = step == 1
        row["l2"] = group["weight_decay"]
        row["beta1"] = 0.0 if first else 1.0
        row["one_minus_beta1"] = group["initial_accumulator_value"] if first else 0.0
        row["step_size"] = float(group["lr"]) / (1.0 + (step - 1) * float(group["lr_decay"]))
        row["eps"] = group["eps"]
        return row[()]
