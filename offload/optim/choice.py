"""From `optimizer=` and keyword arguments to a rule and the defaults of `param_groups`.

"adamw", torch.optim.AdamW        -> a rule with kernels
any other torch.optim.Optimizer   -> TorchRule, the slow path
an instance                       -> its class, and its groups
a rule                            -> itself
settings that it knows (lr, ...)  -> defaults of the groups; the others are the engine's
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from offload.config import EngineConfig
from offload.errors import ConfigError
from offload.optim.adagrad import AdagradRule
from offload.optim.adam import AdamRule
from offload.optim.lion import LionRule
from offload.optim.rules import Group, KernelRule, Progress, Rule, StepCounts
from offload.optim.sgd import SgdRule
from offload.optim.torch_rule import TorchProgress, TorchRule
from offload.optim.torch_step import group_settings

Maker = Callable[[Sequence[Group]], KernelRule]  # from the settings of all groups to the rule

KERNEL_RULES: Mapping[str, Maker] = {
    "adamw": lambda groups: AdamRule(decoupled=True),
    "adam": lambda groups: AdamRule(decoupled=False),
    "sgd": SgdRule.of,
    "lion": lambda groups: LionRule(),
    "adagrad": lambda groups: AdagradRule(),
}
SLOW_NAMES = {"adafactor": torch.optim.Adafactor}
_KERNEL_CLASSES: Mapping[type, str] = {
    torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
}  # fmt: skip
_ENGINE_SETTINGS = frozenset(field.name for field in fields(EngineConfig))


@dataclass(frozen=True)
class Choice:
    """The optimizer of an engine."""

    rule: Rule
    params: Any  # parameters or groups, as given; None: all trainable ones
    defaults: Mapping[str, Any]  # of a group
    rest: Mapping[str, Any]  # settings that are not the optimizer's


def progress_of(rule: Rule) -> Progress:
    """A fresh account of what each parameter has been through under `rule`."""
    if isinstance(rule, TorchRule):
        return TorchProgress(rule)
    return StepCounts(cast(KernelRule, rule))


def choose(optimizer: Any, params: Any, settings: Mapping[str, Any]) -> Choice:
    """Make the rule that `optimizer` names; raises ConfigError for what cannot be honoured.

    `optimizer`: a name, a class, a rule, or an instance, whose groups are taken as they are: they
    stay shared, so that its schedulers work.  `settings`: keyword arguments of the engine.
    """
    settings = {key: value for key, value in settings.items() if value is not None}
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, params, settings)
    if params is not None and not isinstance(params, torch.Tensor):
        params = list(params)
    groups = [item for item in params or () if isinstance(item, dict)] or [{}]
    if isinstance(optimizer, KernelRule) and not isinstance(optimizer, type):
        own = _known(optimizer.defaults, settings)
        defaults = {**optimizer.defaults, **own}
        return Choice(optimizer, params, defaults, _without(settings, own))
    name, cls = _identify(optimizer)
    if name is None:
        own = _taken(cls, settings)
        rule: Rule = TorchRule.of(cls, own, groups)
        defaults = dict(rule.defaults)
    else:
        base = KERNEL_RULES[name]([{}]).defaults
        own = _known(base, settings)
        defaults = {**base, **own}
        rule = KERNEL_RULES[name]([{**defaults, **group} for group in groups])
    return Choice(rule, params, defaults, _without(settings, own))


def _known(keys: Container[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in keys}


def _without(settings: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def _identify(optimizer: Any) -> tuple[str | None, Any]:
    """The name of a rule with kernels, or None and a class."""
    key = optimizer.lower() if isinstance(optimizer, str) else optimizer
    if isinstance(key, str) and key in KERNEL_RULES:
        return key, None
    if isinstance(key, str):
        key = SLOW_NAMES.get(key, key)
    if isinstance(key, type) and issubclass(key, torch.optim.Optimizer):
        return _KERNEL_CLASSES.get(key), key
    names = ", ".join([*KERNEL_RULES, *SLOW_NAMES])
    raise ConfigError(
        f"optimizer: expected one of {names}, a torch.optim.Optimizer class or an instance of"
        f" one, or a rule, got {optimizer!r}. Choose one of them."
    )


def _taken(cls: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a class's constructor takes."""
    parameters = inspect.signature(cls).parameters
    names = set(parameters) - {"params"}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        names |= settings.keys() - _ENGINE_SETTINGS
    return _known(names, settings)


def _of_instance(
    optimizer: torch.optim.Optimizer, params: Any, settings: Mapping[str, Any]
) -> Choice:
    if params is not None:
        raise ConfigError(
            "params: expected none beside an optimizer instance, which has its own groups, got"
            " some. Pass its class instead."
        )
    both = settings.keys() & optimizer.defaults.keys()
    if both:
        raise ConfigError(
            f"{min(both)}: expected it in the optimizer instance, got it as an argument too."
            " Leave it out, or pass the class instead of an instance."
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ConfigError(
            f"optimizer: expected a new instance, got a {type(optimizer).__name__} with state,"
            " which would be lost. Make the engine before the first step."
        )
    groups = optimizer.param_groups
    name, cls = _identify(type(optimizer))
    rule: Rule = KERNEL_RULES[name](groups) if name else TorchRule.of(cls, _init(groups), groups)
    return Choice(rule, groups, dict(optimizer.defaults), settings)


def _init(groups: Sequence[Group]) -> dict[str, Any]:
    """What the constructor of an instance's class is given: the first group's settings."""
    return group_settings(groups[0])


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Adagrad makes its state before the first step."""
    return bool(state) and bool(state.get("step", 1) > 0)
