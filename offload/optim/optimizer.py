"""`OffloadOptimizer`: torch's optimizer interface over state that lives elsewhere.

    loss.backward();  optimizer.step();  optimizer.zero_grad();  scheduler.step()

It owns `param_groups` and nothing else: step and zero_grad are the engine's.  Parameters are
identities here; their data, which may be evicted, is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from offload.errors import ConfigError, StateError
from offload.optim.rules import Rule
from offload.optim.torch_rule import TorchRule


class Stepper(Protocol):
    """Who really steps: the engine, or a recorder in tests."""

    def step(self) -> None: ...

    def zero_grad(self, *, set_to_none: bool) -> None: ...


class OffloadOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose arithmetic happens in the engine, steered by `param_groups`."""

    def __init__(
        self,
        params: Any,  # as for any torch optimizer: parameters, (name, parameter) pairs or groups
        stepper: Stepper,
        *,
        known: Iterable[nn.Parameter],  # every parameter of the engine's model
        rule: Rule,
        defaults: Mapping[str, Any],  # of a group
        takes_all: bool = False,  # the first group is for whatever is trained and in no other
    ) -> None:
        self._stepper = stepper
        self._known = {id(parameter) for parameter in known}
        self._rule = rule
        self._takes_all = takes_all
        super().__init__(params, dict(defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; raises ConfigError for others and bad settings."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except ConfigError:
            self.param_groups.pop()
            raise

    def adopt(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Take what becomes trainable into the first group, if that is for all; returns those that
        are in no group."""
        known = {id(each) for group in self.param_groups for each in group["params"]}
        left = [each for each in parameters if id(each) not in known]
        if not self._takes_all:
            return left
        self.param_groups[0]["params"].extend(left)
        return []

    def _check_group(self, index: int) -> None:
        group = self.param_groups[index]
        self._rule.check(group, index)
        names = group.get("param_names", range(len(group["params"])))
        for name, parameter in zip(names, group["params"], strict=True):
            if isinstance(self._rule, TorchRule):
                what = f"param_groups[{index}], parameter {name}"
                self._rule.check_shape(parameter.shape, what)
            if id(parameter) not in self._known:
                raise ConfigError(
                    f"param_groups[{index}], parameter {name}: expected a parameter of the engine's"
                    " model, got another. Create it before OffloadEngine(model), or give it an"
                    " optimizer of its own."
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that got a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepper.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; with False those that there were are zero, and so are updated."""
        self._stepper.zero_grad(set_to_none=set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `param_groups`; moments belong to the engine's store."""
        if state_dict.get("state"):
            raise StateError(
                f"optimizer: expected a state_dict of this optimizer, whose moments are in the"
                f" store, got moments of {len(state_dict['state'])} parameters."
                " Load them with engine.load_checkpoint."
            )
        groups = self.param_groups
        super().load_state_dict(state_dict)
        # An instance that the engine was made from shares its groups: its scheduler writes there.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """`torch.amp.GradScaler` asks this before its step; it has unscaled nothing that counts."""
        raise StateError(
            "GradScaler: expected a disabled one with this optimizer, whose engine has a loss scale"
            " of its own, got an enabled one. Use GradScaler(enabled=False); with dtype=float16"
            " call engine.backward(loss), or engine.scale(loss).backward()."
        )

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "optimizer: cannot be copied or pickled, its state is in the engine's store."
            " Use engine.save_checkpoint, or optimizer.state_dict() for the param_groups."
        )
