"""The update on ordinary tensors: what the pipeline must equal, bit for bit (N1).

Whole tensors, no chunks, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload import kernels
from offload.partition.states import BLOCK_ELEMS, FP32_MOMENTS, StateTable

TYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "uint8": torch.uint8
}  # fmt: skip


@dataclass(frozen=True)
class TensorState:
    """One parameter's state in memory."""

    param: Tensor  # (numel,) bf16: the high half of the master
    master_lo: Tensor  # (numel,) int16
    states: tuple[kernels.State, ...]
    key: int = 0  # of the parameter's name: chooses how states are rounded

    @classmethod
    def of(
        cls,
        weight: Tensor,
        *,
        name: str = "",
        table: StateTable = FP32_MOMENTS,
        plain: bool = False,
    ) -> TensorState:
        """Split `weight` (any shape and floating type) and start every state at zero.

        `plain`: kept in fp32 where `table` packs.
        """
        master = weight.detach().to(torch.float32).reshape(-1)
        param = torch.empty(master.numel(), dtype=torch.bfloat16)
        master_lo = torch.empty(master.numel(), dtype=torch.int16)
        kernels.split(master, param, master_lo)
        packed = table.packs and not plain
        num_blocks = -(-master.numel() // BLOCK_ELEMS)
        states = tuple(
            kernels.State(
                state,
                torch.zeros(master.numel(), dtype=TYPES[table.format(role, packed=packed)]),
                torch.zeros(num_blocks) if packed else None,
            )
            for state, role in zip(table.names, table.states, strict=True)
        )
        return cls(param, master_lo, states, kernels.tensor_key(name))

    def master(self) -> Tensor:
        """The fp32 master weight, (numel,)."""
        whole = torch.empty(self.param.numel(), dtype=torch.float32)
        kernels.join(self.param, self.master_lo, whole)
        return whole

    def state(self, index: int) -> Tensor:
        """State `index`, decoded: (numel,) fp32."""
        decoded = torch.empty(self.param.numel(), dtype=torch.float32)
        kernels.state_decode(self.states[index], decoded)
        return decoded

    def update(self, grad: Tensor, row: Any) -> bool:  # grad: (numel,) bf16, fp16 or fp32
        """One step in place; True when a master became infinite or NaN."""
        return kernels.update(
            kernels.Split(self.param, self.master_lo), self.states, grad.reshape(-1), row=row,
            origin=kernels.Origin(self.key),
        )  # fmt: skip
