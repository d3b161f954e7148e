"""A model and its torch optimizer that an engine has taken over: what a plain loop asks of them.

optimizer.step(), zero_grad() ...    the script's object; each call goes to the engine's
optimizer.state_dict()               as torch's, its tensors mapped from files of the store
clip_grad_norm_(parameters, m)       the exact norm; the coming step applies the factor
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.engine import outer_loop
from offload.engine.facade import OffloadEngine
from offload.optim.rules import StepCounts


class Taken:
    """The script's optimizer and the engine behind it."""

    def __init__(self, engine: OffloadEngine, optimizer: torch.optim.Optimizer) -> None:
        """Share `param_groups`, so that schedulers go on working; the rest is the engine's."""
        self.engine = engine
        self._optimizer = optimizer
        optimizer.state.clear()
        optimizer.param_groups = engine.optimizer.param_groups
        self._trained = {
            id(parameter) for parameter in engine.module.parameters() if parameter.requires_grad
        }

    def owns(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True where some of `parameters` are the engine's."""
        return any(id(parameter) in self.engine._parts.names_by_id for parameter in parameters)

    def step(self, closure: Any = None) -> Any:
        return self.engine.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.optimizer.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters; raises StateError for moments, which are the store's."""
        self.engine.optimizer.load_state_dict(state_dict)
        self._optimizer.param_groups = self.engine.optimizer.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.engine.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch gives it; states are read one by one and need no memory of their size."""
        found = self.engine.optimizer.state_dict()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        folder = self.engine._parts.ground.store.folders[0]
        for index, parameter in enumerate(parameters):
            state = self._state_of(parameter, folder)
            if state:
                found["state"][index] = state
        return found

    def _state_of(self, parameter: nn.Parameter, folder: Path) -> dict[str, Any]:
        parts = self.engine._parts
        rule, counts = parts.ground.blueprint.rule, parts.counts
        assert isinstance(counts, StepCounts)
        step = counts[parts.names_by_id[id(parameter)]]
        if not step:
            return {}
        state: dict[str, Any] = {} if rule.name == "sgd" else {"step": torch.tensor(float(step))}
        for name in rule.states:
            state[name] = on_disk(self.engine.full_optimizer_state(parameter, name), folder)
        return state

    def clips(self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> bool:
        """True where clipping `parameters` is clipping the step: all of them, by the 2-norm."""
        given = {id(parameter) for parameter in parameters}
        known = self.engine._parts.names_by_id
        return self._trained <= given <= known.keys() and norm_type == 2.0 and max_norm > 0

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Let the coming step clip; returns the norm, as `clip_grad_norm_` does."""
        norm = outer_loop.grad_norm(self.engine)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order 2.0 for gradients from `parameters` is {norm}, so it"
                " cannot be clipped. Set error_if_nonfinite=False to skip such steps."
            )
        outer_loop.clip_next_step(self.engine, max_norm)
        return torch.tensor(norm)


def on_disk(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """`tensor` as a private map of an unlinked file in `folder`: memory that need not stay."""
    if not tensor.numel():
        return tensor
    data: memoryview = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, len(data))
        while data:
            data = data[file.write(data) :]
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    array = np.frombuffer(memory, dtype=np.uint8)
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
