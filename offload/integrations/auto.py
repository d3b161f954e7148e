"""Run a script that knows nothing of us: its model and its torch optimizer are taken over.

    torch.optim.AdamW(...)     made: noted
    model(x)                   the first module to be called that has all parameters of a noted
                               optimizer: an engine takes both over, before the call goes on
    optimizer.step() ...       an optimizer that still waits is left alone, and one line says why

The constructor knows only parameters.  The first call knows which of the modules that hold them is
the one that runs (wrappers hold the same ones), and what the script did meanwhile: a second
optimizer, loaded weights, a GradScaler.  Until then nothing is touched, so a refusal leaves the
script as it would be without us.  torch's classes are patched while the script runs, and no longer.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from offload.engine import outer_loop
from offload.engine.configured import configured_source
from offload.engine.facade import OffloadEngine
from offload.errors import ConfigError, StateError, StoreError
from offload.integrations.auto_file import without_schedule
from offload.integrations.patches import Patches
from offload.integrations.refusals import TAKEN, reason
from offload.integrations.taken import Taken
from offload.optim.optimizer import OffloadOptimizer

_Optimizer = torch.optim.Optimizer
_Layout = tuple[str, tuple[tuple[str, torch.Size], ...]]
_EXISTING = "Discard it (--fresh), or name another folder (--nvme): a plain script begins anew."
_STEPS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class AutoOffload(contextlib.AbstractContextManager["AutoOffload"]):
    """Watches one script, from one thread; leaving it closes the engines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say(line)` tells the user what was taken over and what was not, and why."""
        self._say = say
        self._waiting: list[weakref.ref[_Optimizer]] = []
        self._taken: weakref.WeakKeyDictionary[_Optimizer, Taken] = weakref.WeakKeyDictionary()
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._spoke = False
        self._making = False  # an engine: its own optimizers are not the script's
        self._patches = Patches()
        self._calls = Patches()  # of nn.Module, while an optimizer waits
        self._engines = contextlib.ExitStack()
        self._names: dict[_Layout, list[str]] = {}  # of the stores of models of one layout

    def __enter__(self) -> AutoOffload:
        self._patches.replace(_Optimizer, "__init__", self._constructor(_Optimizer.__init__))
        adagrad = torch.optim.Adagrad
        self._patches.replace(adagrad, "__init__", _without_sums(adagrad.__init__))
        for cls in TAKEN:
            self._patches.replace(cls, "step", self._redirected(cls, "step"))
        for name in _STEPS[1:]:
            self._patches.replace(_Optimizer, name, self._redirected(_Optimizer, name))
        scaler = torch.amp.GradScaler
        self._patches.replace(scaler, "__init__", self._scaler(scaler.__init__))
        clip = self._clip(clip_grad.clip_grad_norm_)
        for owner in (nn.utils, clip_grad):
            self._patches.replace(owner, "clip_grad_norm_", clip)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._patches, self._calls:
            if kind is None:
                for optimizer in self._live():
                    self._leave(optimizer, "its model was never called as a whole")
                if not self._spoke:
                    self._say(
                        "nothing was taken over: the script made no optimizer of torch.optim."
                    )
            self._engines.__exit__(kind, error, trace)  # commits what was stepped

    # --- optimizers

    def _constructor(self, before: Callable[..., None]) -> Callable[..., None]:
        def init(optimizer: _Optimizer, *args: Any, **kwargs: Any) -> None:
            before(optimizer, *args, **kwargs)
            if isinstance(optimizer, OffloadOptimizer):
                self._spoke = True  # the script has an engine of its own
            elif not self._making:
                self._note(optimizer)

        return init

    def _note(self, optimizer: _Optimizer) -> None:
        parameters = _parameters(optimizer)
        if any(taken.owns(parameters) for taken in self._taken.values()):
            raise StateError(
                f"--auto: {type(optimizer).__name__} holds parameters of a model that was taken"
                " over with another optimizer. Make both before the model's first forward, or run"
                " without --auto."
            )
        if type(optimizer) not in TAKEN:
            names = ", ".join(cls.__name__ for cls in TAKEN)
            self._tell_left(optimizer, f"expected one of {names}")
            return
        self._waiting.append(weakref.ref(optimizer))
        if len(self._waiting) == 1:
            self._calls.replace(nn.Module, "__call__", self._called(nn.Module.__call__))

    def _redirected(self, cls: type[_Optimizer], name: str) -> Callable[..., Any]:
        before = getattr(cls, name)
        if getattr(before, "hooked", False):  # torch will hook what replaces it
            before = before.__wrapped__

        def call(optimizer: _Optimizer, *args: Any, **kwargs: Any) -> Any:
            taken = self._taken.get(optimizer)
            if taken is not None:
                return getattr(taken, name)(*args, **kwargs)
            if name == "step" and optimizer in self._live():
                self._leave(optimizer, "its parameters are not those of one module that was called")
            return before(optimizer, *args, **kwargs)

        return call

    def _live(self) -> list[_Optimizer]:
        return [found for each in self._waiting if (found := each()) is not None]

    def _stop_waiting(self, optimizers: Iterable[_Optimizer]) -> None:
        gone = list(optimizers)
        self._waiting = [each for each in self._waiting if each() not in (None, *gone)]
        if not self._waiting:
            self._calls.__exit__()

    def _leave(self, optimizer: _Optimizer, why: str) -> None:
        """Let it run as it would without us."""
        self._stop_waiting([optimizer])
        for state in optimizer.state.values():
            if "sum" in state:  # of Adagrad, made small by _without_sums
                state["sum"] = state["sum"].clone(memory_format=torch.contiguous_format)
        self._tell_left(optimizer, why)

    def _tell_left(self, optimizer: _Optimizer, why: str) -> None:
        self._spoke = True
        self._say(f"{type(optimizer).__name__} is left alone and trains in memory: {why}.")

    # --- modules

    def _called(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._making:
                self._consider(module)
            return before(module, *args, **kwargs)

        return call

    def _consider(self, module: nn.Module) -> None:
        """Take over, or leave, the optimizers whose parameters are all in `module`."""
        if torch.is_inference_mode_enabled():  # what is made now could not be trained
            return
        own = {id(parameter) for parameter in module.parameters()}
        sharing = [each for each in self._live() if own & _ids(each)]
        if not any(_ids(each) <= own for each in sharing):
            return
        why = reason(module, sharing)
        if any(True for _ in self._scalers):
            why = "a GradScaler is enabled, expected none beside bf16 or fp32 training"
        if why is None:
            why = self._take_over(module, sharing[0])
        for optimizer in sharing if why else ():
            self._leave(optimizer, f"{type(module).__name__}: {why}")

    def _take_over(self, module: nn.Module, optimizer: _Optimizer) -> str | None:
        """Put an engine under both; returns why not."""
        parameters = list(module.parameters())
        half = any(parameter.dtype is torch.bfloat16 for parameter in parameters)
        dtype = torch.bfloat16 if half else torch.float32
        names = self._names.setdefault(_layout(module), [])
        name = f"{names[0]}-{len(names) + 1}" if names else None  # None: the engine's own choice
        self._making = True
        try:
            engine = OffloadEngine(
                module, optimizer=optimizer, dtype=dtype, compute_dtype=dtype,
                device=parameters[0].device, name=name,
                config=without_schedule(configured_source(None)), existing_store=_EXISTING,
            )  # fmt: skip
        except (ConfigError, StoreError) as error:
            return str(error).rstrip(".")
        finally:
            self._making = False
        names.append(outer_loop.name_of(engine))
        self._stop_waiting([optimizer])
        self._engines.push(engine)
        # Autocast would keep casts of weights that are refilled with other values later.
        self._engines.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        self._taken[optimizer] = Taken(engine, optimizer)
        self._spoke = True
        self._say(
            f"{type(module).__name__} and its {type(optimizer).__name__} are taken over:"
            f" {sum(p.numel() for p in parameters):,} parameters."
        )
        return None

    # --- what else a loop calls

    def _clip(self, before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def clip_grad_norm_(
            parameters: Any, max_norm: float, norm_type: float = 2.0,
            error_if_nonfinite: bool = False, foreach: bool | None = None,
        ) -> torch.Tensor:  # fmt: skip
            one = isinstance(parameters, torch.Tensor)
            given = [parameters] if one else list(parameters)
            for taken in self._taken.values():
                if taken.clips(given, float(max_norm), float(norm_type)):
                    return taken.clip(float(max_norm), error_if_nonfinite=error_if_nonfinite)
            if isinstance(parameters, types.GeneratorType):  # torch warns of an empty one
                parameters = (each for each in given)
            elif not one:
                parameters = given
            return before(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

        return clip_grad_norm_

    def _scaler(self, before: Callable[..., None]) -> Callable[..., None]:
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            before(scaler, *args, **kwargs)
            if scaler.is_enabled() and self._taken:
                raise StateError(
                    "--auto: GradScaler: expected none after a model was taken over, got an enabled"
                    " one. Make it before the model's first forward, or run without --auto."
                )
            if scaler.is_enabled():
                self._scalers.add(scaler)

        return init


def _parameters(optimizer: _Optimizer) -> Sequence[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _layout(module: nn.Module) -> _Layout:
    """What is equal where two models would have stores of one name."""
    tensors = tuple((name, parameter.shape) for name, parameter in module.named_parameters())
    return type(module).__name__, tensors


def _ids(optimizer: _Optimizer) -> set[int]:
    return {id(parameter) for parameter in _parameters(optimizer)}


def _without_sums(before: Callable[..., None]) -> Callable[..., None]:
    """Adagrad's constructor, with sums that take one element each: they are equal at the start."""

    def init(optimizer: _Optimizer, *args: Any, **kwargs: Any) -> None:
        exact = type(optimizer) is torch.optim.Adagrad
        with _OneElement() if exact else contextlib.nullcontext():
            before(optimizer, *args, **kwargs)

    return init


class _OneElement(TorchFunctionMode):
    """`full_like` gives one element, expanded."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        if func is torch.full_like:
            like, value = args[:2]
            one = torch.full((), value, dtype=like.dtype, device=like.device)
            return one.expand(like.shape)
        return func(*args, **(kwargs or {}))
