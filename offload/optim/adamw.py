"""Adam's hyper-parameters: from `param_groups` to one row per group and step count.

    rule = AdamRule.of("adamw")                      decoupled or L2 decay
    rows, row_of = counts.next_rows([(group, names), ...], grad_scale=s)
    ... the update ...
    counts.advance(names)                            once the step is validated

Step counts are per parameter, as in torch: a parameter that got no gradient does not advance.
Scalars are computed in double and rounded once, in `kernels.adam_row`.
Sources: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offload.errors import ConfigError, StateError
from offload.kernels import ADAM_ROW, adam_row

_UNSUPPORTED = {
    "amsgrad": "The running maximum would need a third moment. Leave it off.",
    "maximize": "Negate the loss instead.",
    "differentiable": "The update runs outside autograd. Leave it off.",
}


@dataclass(frozen=True)
class AdamRule:
    """Which Adam: weight decay taken from the weight (`decoupled`) or added to the gradient."""

    decoupled: bool

    @classmethod
    def of(cls, optimizer: object) -> AdamRule:
        """Read a name, a torch optimizer class or an instance; raises ConfigError for others."""
        if isinstance(optimizer, torch.optim.Optimizer):
            for index, group in enumerate(optimizer.param_groups):
                AdamSettings.of(group, index)
            return cls.of(type(optimizer))
        known = {"adamw": True, torch.optim.AdamW: True, "adam": False, torch.optim.Adam: False}
        key = optimizer.lower() if isinstance(optimizer, str) else optimizer
        if not isinstance(key, str | type) or key not in known:
            raise ConfigError(
                f'optimizer: expected "adamw", "adam", torch.optim.AdamW or torch.optim.Adam, got'
                f" {optimizer!r}. Choose one of them."
            )
        return cls(known[key])


@dataclass(frozen=True)
class AdamSettings:
    """The hyper-parameters of one group, checked."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any], index: int = 0) -> AdamSettings:
        """Check and convert a `param_groups` entry; raises ConfigError that names it."""
        for key, advice in _UNSUPPORTED.items():
            if group.get(key):
                raise ConfigError(f"param_groups[{index}]: {key} is not available. {advice}")
        missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
        if missing:
            raise ConfigError(f"param_groups[{index}]: expected {missing[0]!r}, got none. Set it.")
        betas = tuple(float(beta) for beta in group["betas"])
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(
                f"param_groups[{index}]: expected two betas in [0, 1), got {group['betas']!r}."
            )
        values = {key: float(group[key]) for key in ("lr", "eps", "weight_decay")}
        for key, value in values.items():
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"param_groups[{index}]: expected {key} >= 0, got {value}.")
        return cls(betas=(betas[0], betas[1]), **values)


class StepCounts:
    """How many updates each parameter has had."""

    def __init__(self, rule: AdamRule) -> None:
        self.rule = rule
        self._counts: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def next_rows(
        self, groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]], *, grad_scale: float
    ) -> tuple[NDArray[np.void], dict[str, int]]:
        """Rows of the next update and the row of each name.

        `groups`: hyper-parameters, and the names in that group that got a gradient.
        `grad_scale`: unscale times clip factor.
        Changes nothing: `advance` does, once the step holds.
        """
        rows: list[Any] = []
        row_of: dict[str, int] = {}
        for index, (group, names) in enumerate(groups):
            settings = AdamSettings.of(group, index)
            by_step: dict[int, int] = {}
            for name in names:
                step = self[name] + 1
                if step not in by_step:
                    by_step[step] = len(rows)
                    rows.append(self._row(settings, step, grad_scale))
                row_of[name] = by_step[step]
        return np.array(rows, ADAM_ROW), row_of

    def _row(self, settings: AdamSettings, step: int, grad_scale: float) -> Any:
        return adam_row(
            settings.lr,
            settings.betas,
            settings.eps,
            settings.weight_decay,
            step,
            decoupled=self.rule.decoupled,
            grad_scale=grad_scale,
        )

    def advance(self, names: Iterable[str]) -> None:
        """Count one update of each of `names`."""
        for name in names:
            self._counts[name] = self[name] + 1

    def state_dict(self) -> dict[str, int]:
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take counts as `state_dict` gave them."""
        wrong = [name for name, count in state.items() if int(count) != count or count < 0]
        if wrong:
            raise StateError(f"step count of {wrong[0]}: expected >= 0, got {state[wrong[0]]}.")
        self._counts = {name: int(count) for name, count in state.items()}
