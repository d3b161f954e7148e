"""Optimizer state by torch's names, wherever it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.engine.connect import Parts
from offload.errors import ConfigError
from offload.optim.packing import Packing
from offload.optim.rules import Rule
from offload.partition.states import STATES, Role
from offload.partition.unit import Unit


def optimizer_state(parts: Parts, name: str, state: str) -> torch.Tensor:
    """A HOST copy of `state` of parameter `name`; raises ConfigError for a state it has not."""
    blueprint = parts.ground.blueprint
    unit, _ = parts.reader.find(name)
    if unit.name in blueprint.packings:
        return _packed_state(parts, blueprint.packings[unit.name], name, state)
    if state not in blueprint.rule.states:
        raise _unknown(blueprint.rule, blueprint.rule.states, name, state)
    role = dict(zip(blueprint.rule.states, STATES, strict=False))[state]
    return parts.reader.state_of(name, role)


def check_adam(parts: Parts) -> None:
    """Raise ConfigError unless the engine's optimizer has Adam's moments."""
    rule = parts.ground.blueprint.rule
    if rule.states != ("exp_avg", "exp_avg_sq"):
        raise ConfigError(
            f"load_deepspeed: expected an optimizer with exp_avg and exp_avg_sq, got {rule.name}"
            f" with {', '.join(rule.states) or 'none'}. Make the engine with optimizer='adamw'."
        )


def _packed_state(parts: Parts, packing: Packing, name: str, state: str) -> torch.Tensor:
    pieces = packing.pieces.get(name, {})
    if state not in pieces:
        raise _unknown(parts.ground.blueprint.rule, pieces, name, state)
    unit: Unit = parts.reader.find(name)[0]
    data = parts.reader.data_range(unit, Role.EXP_AVG, 0, 4 * packing.num_elems)
    return pieces[state].of(data.view(torch.float32)).clone()


def _unknown(rule: Rule, known: Iterable[str], name: str, state: str) -> ConfigError:
    names = ", ".join(known) or "none"
    return ConfigError(
        f"optimizer state of {name!r}: expected one that {rule.name} has ({names}), got {state!r}."
    )
