"""Who answers for evicted parameters of one engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.runtime.binding import BoundUnit
from offload.runtime.horizon import Phase
from offload.runtime.lent import LentGradients
from offload.runtime.residency import Residency


class ParameterGuard:
    """Serves parameters while the model runs; knows their names and gradients."""

    def __init__(self, bound: Sequence[BoundUnit]) -> None:
        self._where = {
            id(parameter): (slot.tensor.name, unit.unit.index)
            for unit in bound
            for slot, parameter in zip(unit.unit.slots, unit.parameters, strict=True)
        }
        self.making_state_dict = False
        self.loading: dict[str, torch.Tensor] | None = None  # by load_state_dict
        self.residency: Residency | None = None  # set once; the residency needs the guard's class
        self.lent: LentGradients | None = None  # set once, likewise

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._where[id(parameter)][0]

    def unit_of(self, parameter: nn.Parameter) -> int:
        return self._where[id(parameter)][1]

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return None if self.lent is None else self.lent.read(self.name_of(parameter))

    def assign_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        if self.lent is not None:
            self.lent.assign(self.name_of(parameter), value)

    def close(self) -> None:
        """There are no gradients any more."""
        self.lent = None

    def serve(self, parameter: nn.Parameter) -> bool:
        residency = self.residency
        if residency is None:
            return False
        running = residency.phase is not Phase.IDLE or torch._C._current_graph_task_id() != -1
        if running:
            residency.ensure(self.unit_of(parameter))
        return running
