"""Hooks around a model's forward: autocast, and inputs in the type that computes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def autocast_forward(
    model: nn.Module, device_type: str, dtype: torch.dtype
) -> Callable[[], None]:  # fmt: skip
    """Run the model's forward under torch.autocast; returns what removes the hooks.

    Its weight cache is off: weights are refilled with other values.  Each thread has its own
    stack, as in layer-major order every micro-batch runs in one of its own.
    """
    open_ = threading.local()

    def enter(module: nn.Module, args: Any) -> None:
        context = torch.autocast(device_type, dtype=dtype, cache_enabled=False)
        context.__enter__()
        if not hasattr(open_, "contexts"):
            open_.contexts = []
        open_.contexts.append(context)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(open_, "contexts", None):
            open_.contexts.pop().__exit__(None, None, None)

    removing = contextlib.ExitStack()
    removing.callback(model.register_forward_pre_hook(enter, prepend=True).remove)
    removing.callback(model.register_forward_hook(leave, always_call=True).remove)
    return removing.close


def cast_inputs(
    model: nn.Module, dtype: torch.dtype, *, only: torch.dtype | None = None
) -> Callable[[], None]:
    """Give the model its floating-point inputs in `dtype`; returns what removes the hook.

    `only`: those of that type.
    """

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats and only in (None, value.dtype) else value

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    return model.register_forward_pre_hook(enter, with_kwargs=True).remove
