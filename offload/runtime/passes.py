"""Which pass a forward is: of training, of an evaluation, or of a model's own `generate`.

    forward with gradients        FORWARD
    forward without               EVAL
    model.generate(...)           PROMPT   from its beginning to the end of its first forward
                                  TOKEN    each forward that follows

The units that each uses differ: an encoder runs for the prompt alone, before any forward of the
whole model.  So each has a trace of its own, and going from one to another costs no misses.

Hugging Face's `generate` is followed on every module that has one: adapters call that of the model
inside them.  Other models' forwards are FORWARD or EVAL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from offload.runtime.horizon import Phase


class Passes:
    """Depths of forwards and of `generate`; hooks ask one at a time."""

    def __init__(self) -> None:
        self._depth = 0  # of forwards of whole models
        self._generates = False
        self._prompt = False  # the pass that `generate` began has not ended

    @property
    def inside(self) -> bool:
        """True inside a forward, or `generate`."""
        return bool(self._depth) or self._generates

    def enter(self) -> bool:
        """A forward begins; True: it is the outermost."""
        self._depth += 1
        return self._depth == 1

    def leave(self) -> bool:
        """A forward ends; True: it was the outermost."""
        self._depth = max(self._depth - 1, 0)
        return not self._depth

    def reset(self) -> None:
        """An exception left forwards half-way."""
        self._depth = 0

    def begin_generate(self) -> None:
        self._generates = self._prompt = True

    def end_generate(self) -> None:
        self._generates = self._prompt = False

    def next(self, *, grad: bool) -> tuple[Phase, bool]:
        """The phase of the outermost forward that begins, and whether it goes on."""
        prompt, self._prompt = self._prompt, False
        if grad or not self._generates:
            return (Phase.FORWARD if grad else Phase.EVAL), False
        return (Phase.PROMPT, True) if prompt else (Phase.TOKEN, False)


def whole_models(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and those inside it that are called by themselves."""
    yield model
    yield from (module for module in model.modules() if module is not model and generates(module))


def generates(module: nn.Module) -> bool:
    """True for models with Hugging Face's `generate`."""
    names = ("generate", "prepare_inputs_for_generation")
    return all(callable(getattr(type(module), name, None)) for name in names)


class Followed:
    """A module's `generate` that runs inside `during()`; as handles of hooks, until `remove`."""

    def __init__(
        self, module: nn.Module, during: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._module = module
        self._before = module.__dict__.get("generate")
        call: Any = module.generate

        @functools.wraps(call)
        def generate(*args: Any, **kwargs: Any) -> Any:
            with during():
                return call(*args, **kwargs)

        module.__dict__["generate"] = generate

    def remove(self) -> None:
        """Give the module back what it had."""
        if self._before is None:
            self._module.__dict__.pop("generate", None)
        else:
            self._module.__dict__["generate"] = self._before
