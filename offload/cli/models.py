"""The model that `offload plan` was given, made without memory for its weights, and its arithmetic.

folder, config.json   the architecture that it names, by transformers
module:function       what the function returns
7B, 350M              a generic decoder (schedule/generic.py)
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from offload.cli.generic_decoder import GenericDecoder
from offload.errors import ConfigError, OffloadError
from offload.interchange.pretrained import architecture, construct, on_meta
from offload.partition.unit import Unit
from offload.schedule.generic import DecoderShape
from offload.schedule.work import Attention, Product

_SCALES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.IGNORECASE)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_IN_ROW = re.compile(r"(^|\.)\d+(\.|$)")  # a unit of a list or a sequence


@dataclass(frozen=True)
class Made:
    """A model on the meta device."""

    model: nn.Module
    name: str
    attention: Attention | None  # None: not known
    checkpointing: bool
    max_seq: int | None  # the longest sequence that the model takes, where it tells


def num_params_of(text: str) -> int | None:
    """7B, 350M, 1.3b or a plain number; None for anything else."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        return None
    return int(float(found[1]) * _SCALES.get(found[2].upper(), 1))


def make(argument: str) -> Made:
    """Make the model that `argument` names; raises ConfigError, click.BadParameter."""
    path = Path(argument)
    if path.is_dir() or (path.is_file() and path.suffix == ".json"):
        return _hugging_face(path)
    count = num_params_of(argument)
    if count is not None:
        shape = DecoderShape.of(count)
        with on_meta():
            return Made(GenericDecoder(shape), str(shape), shape.attention(), False, None)
    if ":" in argument:
        return _of_function(argument)
    raise click.BadParameter(
        f"{argument}: expected a folder or config.json of Hugging Face, module:function, a number"
        " of parameters such as 7B, or a Python script, got none of these.",
        param_hint="MODEL",
    )


def _hugging_face(path: Path) -> Made:
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name != "config.json":
        raise click.BadParameter(
            f"{path}: expected a file named config.json, got another JSON file. Name the model's"
            " folder or its config.json.",
            param_hint="MODEL",
        )
    kind = architecture(folder)
    try:
        model = construct(folder, kind)
    except OffloadError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{folder}: expected a config.json that {kind.__name__} takes, got"
            f" {type(error).__name__}: {error}. Correct it, or plan module:function."
        ) from error
    return _told(model, f"{type(model).__name__} of {folder}")


def _of_function(argument: str) -> Made:
    function = function_named(argument, "MODEL")
    try:
        with on_meta():
            model = function()
    except OffloadError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{argument}: expected a function that makes a model when it is called without"
            f" arguments, got {type(error).__name__}: {error}. Weights have no values while it is"
            " planned: fill them elsewhere."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{argument}: expected a function that returns a torch.nn.Module, got"
            f" {type(model).__name__}. Return the model."
        )
    return _told(model, f"{type(model).__name__} of {argument}")


def function_named(spec: str, hint: str) -> Callable[[], Any]:
    """`package.module:name`, found as Python finds modules from the current folder."""
    module, _, name = spec.partition(":")
    with _current_folder():
        try:
            found: Callable[[], Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise click.BadParameter(f"{spec}: {error}.", param_hint=hint) from None
    if not callable(found):
        raise click.BadParameter(
            f"{spec}: expected a function, got {type(found).__name__}.", param_hint=hint
        )
    return found


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
    """Let a console script import from where it is called, as `python -m` does."""
    here = str(Path.cwd())
    if sys.flags.safe_path or here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _told(model: nn.Module, name: str) -> Made:
    """What a model's own settings tell."""
    settings = _settings(model)
    longest = settings.get("max_position_embeddings")
    checkpointing = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    max_seq = longest if isinstance(longest, int) and longest > 0 else None
    return Made(model, name, _attention(model, settings), checkpointing, max_seq)


def _settings(model: nn.Module) -> dict[str, Any]:
    """What a configuration of Hugging Face says, under its usual names; empty without one."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
             "max_position_embeddings", "num_experts_per_tok", *_EXPERTS)  # fmt: skip
    return {name: getattr(config, name) for name in usual if hasattr(config, name)}


def _attention(model: nn.Module, settings: Mapping[str, Any]) -> Attention | None:
    own = getattr(model, "shape", None)
    if isinstance(own, DecoderShape):
        return own.attention()
    layers, heads, hidden = (
        settings.get(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int):
        width = heads * (settings.get("head_dim") or hidden // heads)
        causal = any(word in type(model).__name__ for word in ("CausalLM", "LMHead"))
        return Attention(layers, width, causal)
    modules = [part for part in model.modules() if isinstance(part, nn.MultiheadAttention)]
    if modules:
        return Attention(len(modules), max(part.embed_dim for part in modules), causal=False)
    return None


def products_of(model: nn.Module, units: tuple[Unit, ...]) -> list[Product]:
    """What is multiplied with the tokens, by the shapes of the weights.

    Every weight of two dimensions or more that something else than an embedding holds; leading
    dimensions count matrices, a convolution's kernel its inputs.
    """
    in_block = {
        slot.tensor.name
        for unit in units
        if _IN_ROW.search(unit.name)
        for slot in unit.slots
    }  # fmt: skip
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    share = expert_share(_settings(model))
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.dim() < 2 or parameter.shape[0] == 1:
                continue
            of_expert = share if re.search(r"(^|\.)experts(\.|$)", path) else 1.0
            found.append(_product(module, parameter, of_expert, names[id(parameter)] in in_block))
    return found


def _product(module: nn.Module, weight: torch.Tensor, share: float, in_block: bool) -> Product:
    shape, trained = tuple(weight.shape), weight.requires_grad
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Product(prod(shape[1:]), shape[0], 1, share, trained, in_block)
    return Product(shape[-1], shape[-2], prod(shape[:-2]), share, trained, in_block)


def expert_share(settings: Mapping[str, Any]) -> float:
    """The share of a layer's experts that a token meets; 1: nothing is told of experts."""
    met = settings.get("num_experts_per_tok")
    for name in _EXPERTS:
        count = settings.get(name)
        if isinstance(met, int) and isinstance(count, int) and count:
            return min(1.0, met / count)
    return 1.0
