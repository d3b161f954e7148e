"""DeepSpeed's names of optimizers, and its defaults where they are not torch's.

Adam               AdamW's decoupled weight decay unless adam_w_mode is false; no decay
AdamW              the same, whatever adam_w_mode says
torch_adam: true   torch's class, so AdamW decays by 0.01 where the file does not say
Lion, Adagrad      no decay
any of torch.optim its class, with torch's defaults
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import ConfigError

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
}
# Switches that every optimizer of DeepSpeed's takes; the values of DeepSpeed's own choose nothing
# here, since the same kernel computes all of them.
_SWITCHES: Mapping[str, Any] = {
    "amsgrad": False, "fp32_optimizer_states": True, "set_grad_none": True,
}  # fmt: skip
_TORCH_ADAMW_DECAY = 0.01
_ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction")
_ABSENT = {
    "lamb": "AdamW",
    "onebitadam": "AdamW",
    "zerooneadam": "AdamW",
    "onebitlamb": "AdamW",
    "muadam": "AdamW",
    "muadamw": "AdamW",
    "musgd": "SGD",
}


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer section in this engine's words."""

    kind: str  # a name of a rule with kernels, or a class of torch.optim as the file spells it
    settings: Mapping[str, Any]  # of its parameter groups
    bias_correction: bool = True  # Adam's
    max_grad_norm: float | None = None  # older files clip here


def named_optimizer(flat: Mapping[str, Any]) -> NamedOptimizer | None:
    """The optimizer of a file; None where it has none.  Raises ConfigError."""
    kind = flat.get("optimizer.type")
    if kind is None:
        return None
    given = flat.get("optimizer.params", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"config, optimizer.params: expected an object, got {given!r}.")
    params = {key: value for key, value in given.items() if value not in (None, "auto")}
    norm = params.pop("max_grad_norm", None)
    name = kind.lower()
    if name in _ABSENT:
        raise ConfigError(
            f"config, optimizer.type: {kind} is not available here: expected Adam, AdamW, Lion,"
            f" Adagrad or a class of torch.optim, got {kind!r}. Take {_ABSENT[name]!r}."
        )
    if name not in _DEFAULTS:
        return NamedOptimizer(kind, params, max_grad_norm=norm)
    _check(kind, name, params)
    decoupled = name == "adamw" or params.get("adam_w_mode", True)
    if name == "adam":
        name = "adamw" if decoupled else "adam"
    own = {key: value for key, value in params.items() if key in _DEFAULTS[name]}
    if name == "adamw" and params.get("torch_adam"):
        own.setdefault("weight_decay", _TORCH_ADAMW_DECAY)
    if params.get("amsgrad"):
        own["amsgrad"] = True  # which the rule refuses, with its reason
    return NamedOptimizer(
        name, {**_DEFAULTS[name], **own}, bool(params.get("bias_correction", True)), norm
    )


def _check(kind: str, name: str, params: Mapping[str, Any]) -> None:
    """Refuse misspelt settings and texts that are no numbers."""
    known = [*_DEFAULTS[name], *_SWITCHES, "max_grad_norm"]
    if name in ("adam", "adamw"):
        known += _ADAM_SWITCHES
    for key, value in params.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"config, optimizer.params: {kind} has no setting {key!r}. {hint}")
        if isinstance(value, str):
            raise ConfigError(
                f"config, optimizer.params.{key}: expected a number, got the text {value!r}."
                " Remove the quotes."
            )
