"""Lion: the sign of an interpolation between momentum and gradient.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from _offload_native import lib

from offload.kernels import ROW
from offload.optim.rules import Group, check_betas, check_flags, check_numbers, new_row


@dataclass(frozen=True)
class LionRule:
    """One state; decay is decoupled."""

    @property
    def name(self) -> str:
        return "lion"

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg",)

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return ROW

    def check(self, group: Group, index: int) -> None:
        check_flags(group, index)
        check_numbers(group, index, "lr", "weight_decay")
        check_betas(group, index)

    def row(self, group: Group, *, step: int, grad_scale: float) -> Any:
        row = new_row(lib.SIMD_LION, step, grad_scale)
        lr = float(group["lr"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        row["decay"] = 1.0 - lr * float(group["weight_decay"])
        row["beta1"], row["one_minus_beta1"] = beta1, 1.0 - beta1
        row["beta2"], row["one_minus_beta2"] = beta2, 1.0 - beta2
        row["step_size"] = lr
        return row[()]
