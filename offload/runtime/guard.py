"""Who answers for evicted parameters of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from offload.runtime.binding import BoundUnit
from offload.runtime.horizon import Phase
from offload.runtime.residency import Residency


class ParameterGuard:
    """Serves parameters while the model runs; knows their names."""

    def __init__(self, bound: Sequence[BoundUnit]) -> None:
        self._where = {
            id(parameter): (slot.tensor.name, unit.unit.index)
            for unit in bound
            for slot, parameter in zip(unit.unit.slots, unit.parameters, strict=True)
        }
        self.making_state_dict = False
        self.residency: Residency | None = None  # set once; the residency needs the guard's class
        self.kept: Callable[[int, str], bool] = lambda unit, name: False  # set once, likewise

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._where[id(parameter)][0]

    def unit_of(self, parameter: nn.Parameter) -> int:
        return self._where[id(parameter)][1]

    def keeps_gradient(self, parameter: nn.Parameter) -> bool:
        name, unit = self._where[id(parameter)]
        return self.kept(unit, name)

    def serve(self, parameter: nn.Parameter) -> bool:
        residency = self.residency
        if residency is None:
            return False
        running = residency.phase is not Phase.IDLE or torch._C._current_graph_task_id() != -1
        if running:
            residency.ensure(self.unit_of(parameter))
        return running
