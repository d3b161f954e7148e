"""One step of a torch optimizer class on one tensor, and its state as rows of plain values.

    after = step(cls, settings, master, grad, state)     state None: the class makes its own
    tensors(after)      state of one element or more      -> the store's state roles
    scalars(after)      numbers and 0-dimensional tensors -> memory, the generation's record

A fresh instance is made for each call: an instance knows nothing but its group and its state.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import ConfigError

OptimizerClass = type[torch.optim.Optimizer]
State = dict[str, Any]
Frozen = tuple[tuple[str, Any], ...]  # sorted items, of values that `ast.literal_eval` reads back
_TENSOR = "tensor"


def make(cls: OptimizerClass, parameter: Tensor, settings: Mapping[str, Any]) -> Any:
    """Make an instance over one parameter whose group has `settings`."""
    known = inspect.signature(cls).parameters.values()
    several = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known)
    names = {one.name for one in known}
    optimizer = cls(
        [parameter], **{key: value for key, value in settings.items() if several or key in names}
    )
    optimizer.param_groups[0].update(settings)
    return optimizer


def step(
    cls: OptimizerClass,
    settings: Mapping[str, Any],
    master: Tensor,  # any shape, fp32; updated in place
    grad: Tensor,  # the same shape, fp32; may be overwritten
    state: State | None,
) -> State:
    """Run one step; return the state after it.  `state` None: the first update."""
    parameter = nn.Parameter(master)
    parameter.grad = grad
    optimizer = make(cls, parameter, settings)
    if state is not None:
        optimizer.state[parameter] = state
    optimizer.step()
    if group_settings(optimizer.param_groups[0]) != dict(settings):
        raise ConfigError(
            f"optimizer {cls.__name__}: expected param_groups that step() leaves as they are, got"
            " some that it keeps state in. Choose another optimizer."
        )
    if parameter.data_ptr() != master.data_ptr():
        master.copy_(parameter.detach())
    return dict(optimizer.state[parameter])


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State that is kept in the store, by name."""
    return {
        key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0
    }


def scalars(state: Mapping[str, Any], cls: OptimizerClass) -> Frozen:
    """The rest of the state, as plain values."""
    kept = tensors(state)
    return freeze({key: value for key, value in state.items() if key not in kept}, cls, "state")


def freeze(values: Mapping[str, Any], cls: OptimizerClass, what: str) -> Frozen:
    """Sorted items of plain values; raises ConfigError for others, naming the key."""
    return tuple(sorted((key, _freeze(value, cls, what, key)) for key, value in values.items()))


def thaw(frozen: Frozen) -> State:
    """The values again."""
    return {key: _thaw(value) for key, value in frozen}


def _freeze(value: Any, cls: OptimizerClass, what: str, key: str) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return (_TENSOR, str(value.dtype).removeprefix("torch."), _plain(value.item()))
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, cls, what, key) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return _plain(value)
    raise ConfigError(
        f"optimizer {cls.__name__}, {what} {key!r}: expected numbers, text or tensors, got"
        f" {type(value).__name__}. It cannot run on pieces of a model that is on disk."
    )


def _plain(value: Any) -> Any:
    """Infinity and NaN as text, which literals cannot spell."""
    return ("float", repr(value)) if isinstance(value, float) and value - value != 0 else value


def _thaw(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("float",) and len(value) == 2:
        return float(value[1])
    if isinstance(value, tuple) and value[:1] == (_TENSOR,) and len(value) == 3:
        return torch.tensor(_thaw(value[2]), dtype=getattr(torch, value[1]))
    if isinstance(value, tuple):
        return tuple(_thaw(item) for item in value)
    return value


@dataclass(frozen=True)
class TorchRow:
    """What an update of one tensor needs beside the tensor; equal rows mean equal updates."""

    settings: Frozen  # of its group
    scalars: Frozen | None  # of its state; None: it was never updated
    grad_scale: float
    name: str = ""  # of the tensor, where it matters which

    def encode(self) -> bytes:
        return repr((self.settings, self.scalars, self.grad_scale, self.name)).encode()

    @classmethod
    def decode(cls, data: bytes) -> TorchRow:
        return cls(*ast.literal_eval(data.decode()))
