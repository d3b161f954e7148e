"""Any `torch.optim.Optimizer` class as a rule: the slow path, for optimizers without a kernel.

    trial on a small parameter, before anything is allocated:
      runs at all?                          else ConfigError, with what it raised
      whole == halves, states of its shape? -> element-wise: runs on the segments of chunks
      anything else (Muon, Adafactor)       -> whole tensors; states of any shape, packed

State tensors live in the store.  Scalar state (a step count, a running product) must not depend on
gradients; it is kept in memory per parameter and belongs to the generation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import ConfigError
from offload.optim import torch_step
from offload.optim.rules import Group
from offload.optim.torch_step import Frozen, OptimizerClass, TorchRow

MOST_STATES = 2
ROW_BYTES = 2048
_SHAPE = (16, 8)  # of a trial: halves are whole vectors, so no rounding depends on the cut
_SIZES = (5, 7, 11, 13, 17)  # of trials that ask for the shapes of state: no two equal
_NUM_STEPS = 3


@dataclass(frozen=True)
class Nature:
    """What trials found out about a class with some settings."""

    states: tuple[str, ...]  # element-wise: of the parameter's shape
    whole: bool  # not element-wise: whole tensors


@dataclass(frozen=True)
class TorchRule:
    """A torch class, its settings, and what trials found out about it."""

    cls: OptimizerClass
    defaults: Mapping[str, Any] = field(hash=False)
    states: tuple[str, ...]
    whole: bool

    row_dtype = np.dtype((np.bytes_, ROW_BYTES))

    @classmethod
    def of(
        cls, optimizer: OptimizerClass, settings: Mapping[str, Any], groups: Iterable[Group]
    ) -> TorchRule:
        """Try the class with `settings` overridden by each of `groups`; raises ConfigError."""
        try:
            made = torch_step.make(optimizer, torch.zeros(1, 1, requires_grad=True), settings)
            defaults = torch_step.group_settings(made.param_groups[0])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer {optimizer.__name__}: {error}. Change it.") from error
        natures = []
        for group in groups:
            natures.append(try_out(optimizer, {**defaults, **torch_step.group_settings(group)}))
        states = tuple(sorted({name for nature in natures for name in nature.states}))
        whole = any(nature.whole for nature in natures)
        if not whole and len(states) > MOST_STATES:
            raise ConfigError(
                f"optimizer {optimizer.__name__}: expected at most {MOST_STATES} state tensors a"
                f" parameter, got {len(states)} ({', '.join(states)}). Change the settings that ask"
                " for the third, or take another optimizer."
            )
        return cls(optimizer, defaults, () if whole else states, whole)

    @property
    def name(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def check(self, group: Group, index: int) -> None:
        """Refuse what the class's constructor refuses."""
        settings = torch_step.group_settings(group)
        torch_step.freeze(settings, self.cls, f"param_groups[{index}],")
        for key in ("capturable", "differentiable"):
            if settings.get(key):
                raise ConfigError(f"param_groups[{index}]: {key} is not available. Leave it off.")
        try:
            torch_step.make(self.cls, torch.zeros(1, 1, requires_grad=True), settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"param_groups[{index}]: {error}. Change it.") from error

    def check_shape(self, shape: Sequence[int], what: str) -> None:
        """Raise ConfigError, naming `what`, for a tensor that the class does not take."""
        if self.whole:
            self.state_shapes(shape, what)

    def state_shapes(self, shape: Sequence[int], what: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the packed state of a whole tensor of `shape`, by name."""
        try:
            settings = torch_step.freeze(self.defaults, self.cls, "setting")
            found = _symbols(_key(self.cls), settings, max(1, len(shape)))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{what}: expected a tensor that {self.cls.__name__} takes, got one of shape"
                f" {tuple(shape)}: {error}. Give such tensors another optimizer, or freeze them."
            ) from error
        sizes = tuple(shape) or (1,)
        return {
            name: tuple(1 if place is None else sizes[place] for place in places)
            for name, places in found.items()
        }


class TorchProgress:
    """The scalar state of each parameter, and the rows of the next update."""

    def __init__(self, rule: TorchRule) -> None:
        self.rule = rule
        self._scalars: dict[str, Frozen] = {}
        self._next: dict[str, Frozen] = {}  # after the update that `next_rows` described last

    def next_rows(
        self, groups: Sequence[tuple[Group, Sequence[str]]], *, grad_scale: float
    ) -> tuple[NDArray[Any], dict[str, int]]:
        """Rows of the next update and the row of each name; changes nothing that counts."""
        rows: dict[bytes, int] = {}
        row_of: dict[str, int] = {}
        self._next = {}
        for index, (group, names) in enumerate(groups):
            self.rule.check(group, index)
            settings = torch_step.freeze(torch_step.group_settings(group), self.rule.cls, "setting")
            for name in names:
                before = self._scalars.get(name)
                row = TorchRow(settings, before, grad_scale, name if self.rule.whole else "")
                row_of[name] = rows.setdefault(self._encode(row), len(rows))
                self._next[name] = _scalars_after(_key(self.rule.cls), settings, before)
        return np.array(list(rows), self.rule.row_dtype), row_of

    def _encode(self, row: TorchRow) -> bytes:
        data = row.encode()
        if len(data) > ROW_BYTES:
            raise ConfigError(
                f"optimizer {self.rule.name}: expected settings of at most {ROW_BYTES} characters,"
                f" got {len(data)}. Shorten them."
            )
        return data

    def advance(self, names: Iterable[str]) -> None:
        """Take over the scalars that the last described update leaves."""
        for name in names:
            self._scalars[name] = self._next[name]

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scalars)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take scalars as `state_dict` gave them."""
        self._scalars = {name: _tuples(scalars) for name, scalars in state.items()}


def try_out(cls: OptimizerClass, settings: Mapping[str, Any]) -> Nature:
    """Run a class on a small dense parameter; raises ConfigError where it cannot work here."""
    if inspect.signature(cls.step).parameters["closure"].default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {cls.__name__}: expected one that steps once a backward, got one that needs"
            " a closure to evaluate the model again. Choose another optimizer."
        )
    try:
        weights, state = _run(cls, settings, _data(_SHAPE))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"optimizer {cls.__name__}: expected it to run on a dense fp32 parameter, got"
            f" {type(error).__name__}: {error}. Choose another optimizer or other settings."
        ) from error
    _, other = _run(cls, settings, _data(_SHAPE), 3.0)
    if torch_step.scalars(state, cls) != torch_step.scalars(other, cls):
        raise ConfigError(
            f"optimizer {cls.__name__}: expected scalar state that depends on the settings and the"
            " number of steps alone, got some that depends on gradients. Choose another optimizer."
        )
    kept = torch_step.tensors(state)
    wrong = [name for name, tensor in kept.items() if tensor.dtype is not torch.float32]
    if wrong:
        raise ConfigError(
            f"optimizer {cls.__name__}, state {wrong[0]!r}: expected float32, got"
            f" {kept[wrong[0]].dtype}. Choose another optimizer."
        )
    alike = all(tensor.shape == _SHAPE for tensor in kept.values())
    whole = not (alike and _is_cuttable(cls, settings, weights))
    return Nature(tuple(sorted(kept)), whole)


def _data(shape: Sequence[int]) -> list[Tensor]:
    """Weights and gradients of a trial: always the same, without touching random numbers."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    waves = [torch.sin(count * (0.7 + 0.3 * index) + index) for index in range(_NUM_STEPS + 1)]
    return [wave.view(tuple(shape)) for wave in waves]


def _run(
    cls: OptimizerClass, settings: Mapping[str, Any], data: Sequence[Tensor], scale: float = 1.0
) -> tuple[Tensor, dict[str, Any]]:
    """Steps from the beginning, one a gradient; the weights and the state after them."""
    master, state = data[0].clone(), None
    for grad in data[1:]:
        state = torch_step.step(cls, settings, master, grad * scale, state)
    return master, state or {}


def _is_cuttable(cls: OptimizerClass, settings: Mapping[str, Any], weights: Tensor) -> bool:
    """Whether two halves, each on its own, end up where the whole does."""
    half = weights.numel() // 2
    try:
        parts = [
            _run(cls, settings, [wave.flatten()[at : at + half] for wave in _data(_SHAPE)])[0]
            for at in (0, half)
        ]
    except Exception:  # it wants a matrix
        return False
    return torch.allclose(torch.cat(parts), weights.flatten(), rtol=1e-5, atol=1e-6, equal_nan=True)


@lru_cache(maxsize=64)
def _symbols(
    cls: OptimizerClass, settings: Frozen, num_dims: int
) -> dict[str, tuple[int | None, ...]]:
    """For each state tensor, the dimension of the parameter that each of its own is; None: 1."""
    if num_dims > len(_SIZES):
        raise ConfigError(
            f"optimizer {cls.__name__}: expected tensors of at most {len(_SIZES)} dimensions, got"
            f" {num_dims}. Freeze them."
        )
    sizes = _SIZES[:num_dims]
    _, state = _run(cls, torch_step.thaw(settings), _data(sizes)[:2])
    found: dict[str, tuple[int | None, ...]] = {}
    for name, tensor in sorted(torch_step.tensors(state).items()):
        if not all(size == 1 or size in sizes for size in tensor.shape):
            raise ConfigError(
                f"optimizer {cls.__name__}, state {name!r}: expected dimensions of the parameter,"
                f" got {tuple(tensor.shape)} for {sizes}. Choose another optimizer."
            )
        found[name] = tuple(None if size == 1 else sizes.index(size) for size in tensor.shape)
    return found


@lru_cache(maxsize=64)
def _scalars_after(cls: OptimizerClass, settings: Frozen, before: Frozen | None) -> Frozen:
    """The scalar state after an update; it does not depend on the tensor (`try_out`)."""
    values, (weights, grad, *_) = torch_step.thaw(settings), _data(_SHAPE)
    state = torch_step.step(cls, values, weights.clone(), grad.clone(), None)
    if before is not None:
        state.update(torch_step.thaw(before))
        state = torch_step.step(cls, values, weights, grad, state)
    return torch_step.scalars(state, cls)


def _key(cls: OptimizerClass) -> Any:
    """A class as an argument of a cached function: mypy takes `Optimizer`'s hash for its own."""
    return cls


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
