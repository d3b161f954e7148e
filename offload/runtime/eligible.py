"""Parameters that an engine can take over, those that it leaves alone, those that it must refuse.

float32, bfloat16, float16            taken over
another type, frozen                  left alone, where it is
another type, trainable               refused: it would never be trained
not initialised yet; sparse gradients refused: better now than in the first step
"""

from __future__ import annotations

import torch
from torch import nn

from offload.errors import ConfigError

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def divide(model: nn.Module) -> tuple[dict[str, nn.Parameter], tuple[str, ...]]:
    """The parameters to take over by name, and a line for each that is left alone.

    Raises ConfigError, naming it, for one that could not be trained.
    """
    managed: dict[str, nn.Parameter] = {}
    left_alone: list[str] = []
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r}: expected it initialised, got one whose shape a first forward"
                " decides. Run the model once on a batch before making the engine."
            )
        if parameter.dtype in _TYPES:
            managed[name] = parameter
        elif parameter.requires_grad:
            raise ConfigError(
                f"parameter {name!r}: expected float32, bfloat16 or float16, got {parameter.dtype},"
                " which cannot be trained here. Convert it before making the engine, or freeze it"
                " with requires_grad_(False): then it is left alone."
            )
        else:
            left_alone.append(f"{name}: {parameter.dtype} is none of float32, bfloat16, float16")
    _refuse_sparse(model)
    return managed, tuple(left_alone)


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"embedding {name!r}: expected dense gradients, got sparse=True. Set its attribute"
                " `sparse` to False: an update of all rows is what dense optimizers do anyway."
            )
