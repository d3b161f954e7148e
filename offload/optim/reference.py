"""The update on ordinary tensors: what the pipeline must equal, bit for bit (N1).

Whole tensors, no chunks, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload import kernels


@dataclass(frozen=True)
class TensorState:
    """One parameter's state in memory."""

    param: Tensor  # (numel,) bf16: the high half of the master
    master_lo: Tensor  # (numel,) int16
    exp_avg: Tensor  # (numel,) fp32
    exp_avg_sq: Tensor  # (numel,) fp32

    @classmethod
    def of(cls, weight: Tensor) -> TensorState:
        """Split `weight` (any shape and floating type) and start both moments at zero."""
        master = weight.detach().to(torch.float32).reshape(-1)
        param = torch.empty(master.numel(), dtype=torch.bfloat16)
        master_lo = torch.empty(master.numel(), dtype=torch.int16)
        kernels.split(master, param, master_lo)
        return cls(param, master_lo, torch.zeros_like(master), torch.zeros_like(master))

    def master(self) -> Tensor:
        """The fp32 master weight, (numel,)."""
        whole = torch.empty(self.param.numel(), dtype=torch.float32)
        kernels.join(self.param, self.master_lo, whole)
        return whole

    def update(self, grad: Tensor, row: Any) -> bool:  # grad: (numel,) bf16, fp16 or fp32
        """One Adam step in place; True when a master became infinite or NaN."""
        return kernels.adam_split(
            self.param, self.master_lo, self.exp_avg, self.exp_avg_sq, grad.reshape(-1), row=row
        )
