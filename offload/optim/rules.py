"""What an optimizer is to the engine: its states, its settings, and one row a group and step.

    rule.states            ("exp_avg", "exp_avg_sq")     state tensors, by torch's names, at most 2
    rule.check(group, i)                                 a `param_groups` entry, before anything
    rule.row(group, step=..., grad_scale=...)            what is equal for all elements of a tensor
                                                         in a step: in double, rounded once
    counts = StepCounts(rule)
    rows, row_of = counts.next_rows([(group, names), ...], grad_scale=s)
    ... the update ...
    counts.advance(names)                                once the step is validated

Step counts are per parameter, as in torch: a parameter that got no gradient does not advance.
`README.md` beside this file shows how to add an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from offload.errors import ConfigError, StateError
from offload.kernels import ROW

Group = Mapping[str, Any]  # an entry of `param_groups`

_REFUSED = {
    "capturable": "The update runs outside CUDA graphs. Leave it off.",
    "differentiable": "The update runs outside autograd. Leave it off.",
}


class Rule(Protocol):
    """An optimizer as data and a check; whoever does the arithmetic reads the rows."""

    @property
    def name(self) -> str:
        """What the store's record and messages call it."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors as torch has them, in the order of the kernel's streams."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Every key of a `param_groups` entry with its default."""

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The type of a row."""

    def check(self, group: Group, index: int) -> None:
        """Raise ConfigError, naming group and key, for settings that cannot be honoured."""


@runtime_checkable
class KernelRule(Rule, Protocol):
    """An optimizer whose arithmetic is a kernel's."""

    def row(self, group: Group, *, step: int, grad_scale: float) -> Any:
        """The row of update number `step` (from 1); `grad_scale`: unscale times clip factor."""


class Progress(Protocol):
    """What each parameter has been through, and the rows that follow from it."""

    def next_rows(
        self, groups: Sequence[tuple[Group, Sequence[str]]], *, grad_scale: float
    ) -> tuple[NDArray[Any], dict[str, int]]:
        """Rows of the next update and the row of each name; changes nothing.

        `groups`: settings, and the names in that group that got a gradient.
        """

    def advance(self, names: Iterable[str]) -> None:
        """Note that the update that `next_rows` described holds for `names`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StepCounts:
    """How many updates each parameter has had."""

    def __init__(self, rule: KernelRule) -> None:
        self.rule = rule
        self._counts: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def next_rows(
        self, groups: Sequence[tuple[Group, Sequence[str]]], *, grad_scale: float
    ) -> tuple[NDArray[Any], dict[str, int]]:
        """Rows of the next update, one per group and step count, and the row of each name.

        Changes nothing: `advance` does, once the step holds.
        """
        rows: list[Any] = []
        row_of: dict[str, int] = {}
        for index, (group, names) in enumerate(groups):
            self.rule.check(group, index)
            by_step: dict[int, int] = {}
            for name in names:
                step = self[name] + 1
                if step not in by_step:
                    by_step[step] = len(rows)
                    scale = -grad_scale if group.get("maximize") else grad_scale
                    rows.append(self.rule.row(group, step=step, grad_scale=scale))
                row_of[name] = by_step[step]
        return np.array(rows, self.rule.row_dtype), row_of

    def advance(self, names: Iterable[str]) -> None:
        """Count one update of each of `names`."""
        for name in names:
            self._counts[name] = self[name] + 1

    def state_dict(self) -> dict[str, int]:
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take counts as `state_dict` gave them."""
        wrong = [name for name, count in state.items() if int(count) != count or count < 0]
        if wrong:
            raise StateError(f"step count of {wrong[0]}: expected >= 0, got {state[wrong[0]]}.")
        self._counts = {name: int(count) for name, count in state.items()}


def new_row(algorithm: int, step: int, grad_scale: float) -> NDArray[np.void]:
    """A row (`struct simd_row`) of `algorithm`, all factors zero but the gradient's and decay."""
    row = np.zeros((), ROW)
    row["algorithm"], row["step"] = algorithm, step % 2**32
    row["grad_scale"], row["decay"] = grad_scale, 1.0
    return row


def torch_defaults(optimizer: type[torch.optim.Optimizer], **settings: Any) -> dict[str, Any]:
    """The keys and defaults of a torch class's groups, `params` left out."""
    made = optimizer([torch.nn.Parameter(torch.zeros(1, 1))], **settings)
    hidden = ("params", "param_names")
    return {key: value for key, value in made.param_groups[0].items() if key not in hidden}


def check_flags(group: Group, index: int) -> None:
    """Refuse what no kernel does; `foreach` and `fused` name implementations and say nothing."""
    for key, advice in _REFUSED.items():
        if group.get(key):
            raise ConfigError(f"param_groups[{index}]: {key} is not available. {advice}")


def check_numbers(group: Group, index: int, *keys: str) -> None:
    """Refuse groups without finite values >= 0 at `keys`; a learning rate may be a tensor."""
    for key in keys:
        if key not in group:
            raise ConfigError(f"param_groups[{index}]: expected {key!r}, got none. Set it.")
        value = _number(group[key])
        if value is None or not (math.isfinite(value) and value >= 0.0):
            raise ConfigError(
                f"param_groups[{index}]: expected {key} >= 0, got {group[key]!r}. Change it."
            )


def check_betas(group: Group, index: int) -> None:
    """Refuse groups without two betas in [0, 1)."""
    if "betas" not in group:
        raise ConfigError(f"param_groups[{index}]: expected 'betas', got none. Set it.")
    betas = group["betas"]
    numbers = [_number(beta) for beta in betas] if isinstance(betas, Sequence) else []
    if len(numbers) != 2 or not all(b is not None and 0.0 <= b < 1.0 for b in numbers):
        raise ConfigError(
            f"param_groups[{index}]: expected two betas in [0, 1), got {betas!r}. Change it."
        )


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
