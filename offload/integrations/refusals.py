"""Why a model of an unmodified script is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from offload.runtime.hooks import is_hooked

TAKEN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_WRAPPERS = {
    "DistributedDataParallel": "several processes are not supported",
    "DataParallel": "several devices are not supported",
    "FullyShardedDataParallel": "several processes are not supported",
    "OptimizedModule": "it is compiled as a whole; compile its blocks instead",
}


def reason(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str | None:
    """The first reason against taking `module` over with its optimizers; None: there is none."""
    return next(_reasons(module, optimizers), None)


def _reasons(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[str]:
    if len(optimizers) > 1:
        yield f"{len(optimizers)} optimizers hold its parameters, expected one"
    for each in type(module).__mro__:
        if each.__name__ in _WRAPPERS:
            yield _WRAPPERS[each.__name__]
    if module._compiled_call_impl is not None:  # module.compile()
        yield _WRAPPERS["OptimizedModule"]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        yield _WRAPPERS["DistributedDataParallel"]
    if is_hooked(module):
        yield "an engine holds it already"
    yield from _of_parameters(module)
    yield from _of_modules(module)
    if any(_has_stepped(optimizer) for optimizer in optimizers):
        yield "its optimizer has state already, from a step or from load_state_dict"


def _of_parameters(module: nn.Module) -> Iterator[str]:
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            yield f"{name} is a {type(parameter).__name__}, expected a plain nn.Parameter"
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            yield f"{name} is {parameter.dtype}, expected float32 or bfloat16"
        if parameter.grad is not None:
            yield f"{name} has a gradient already"
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1 or devices[0].partition(":")[0] not in ("cpu", "cuda"):
        yield f"its parameters are on {', '.join(devices)}, expected one CPU or CUDA device"


def _of_modules(module: nn.Module) -> Iterator[str]:
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            yield f"{name} has sparse gradients, expected sparse=False"


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Adagrad makes its state before the first step."""
    return any(state and float(state.get("step", 1)) > 0 for state in optimizer.state.values())
