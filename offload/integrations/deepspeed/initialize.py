"""`offload.initialize`: DeepSpeed's entry point."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from offload.deepspeed_config.recipe import Recipe, recipe_of
from offload.engine.configured import configured_source
from offload.engine.facade import OffloadEngine
from offload.engine.inputs import cast_inputs
from offload.engine.outer_loop import at_close, compute_dtype, tracked
from offload.errors import ConfigError
from offload.integrations.deepspeed import zero
from offload.integrations.deepspeed.arguments import check_alone, config_of
from offload.integrations.deepspeed.engine import DeepSpeedEngine

_Made = tuple[DeepSpeedEngine, torch.optim.Optimizer, DataLoader[Any] | None, Any]


def initialize(  # noqa: PLR0913 (the names are DeepSpeed's)
    args: Any = None, model: nn.Module | None = None, optimizer: Any = None,
    model_parameters: Any = None, training_data: Dataset[Any] | None = None, *,
    lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
    dist_init_required: bool | None = None, collate_fn: Callable[..., Any] | None = None,
    config: Any = None, mesh_param: Any = None, config_params: Any = None, **settings: Any,
) -> _Made:  # fmt: skip
    """Make an engine of `model`; returns (engine, optimizer, training_dataloader, lr_scheduler).

    The arguments up to `training_data` may be positional.
    `config`, `config_params` or `args.deepspeed_config`: a DeepSpeed file, as path, dict or base64;
    without them, what `offload-train --config` names.  `optimizer`: an instance, a class, or a
    callable that makes one of parameters; it replaces the file's.  `lr_scheduler`: likewise, a
    callable is given the optimizer; it is stepped by engine.step().  `model_parameters`: parameters
    or groups to train.  `settings`: anything that OffloadEngine takes; they win over the file.
    `distributed_port`, `dist_init_required` and `mesh_param` have no effect in one process.

    Raises ConfigError, BudgetError or StoreError before anything is allocated.
    """
    check_alone()
    _show_log()
    if model is None:
        raise ConfigError("initialize: expected a model, got none. Pass model=.")
    if mpu is not None:
        raise ConfigError("initialize: expected mpu=None, got one: there is one process.")
    recipe = recipe_of(_source(args, config, config_params))
    if optimizer is None and recipe.optimizer is None:
        raise ConfigError(
            "initialize: expected an optimizer in the configuration or as an argument, got none."
            ' Add "optimizer": {"type": "AdamW"}.'
        )
    optimizer, params = _optimizer(model, optimizer, model_parameters)
    used = recipe if lr_scheduler is None else dataclasses.replace(recipe, scheduler=None)
    loader = None
    if training_data is not None:
        loader = _loader(recipe, training_data, collate_fn)
    offload = OffloadEngine(model, params=params, optimizer=optimizer, config=used, **settings)
    zero.register(offload)
    computes, moves = compute_dtype(offload), offload.config.dtype
    if computes is not moves:  # scripts give inputs in the type that the file names
        at_close(offload, cast_inputs(model, computes, only=moves))
    engine = DeepSpeedEngine(offload, recipe, training_dataloader=loader)
    if lr_scheduler is None:
        engine.lr_scheduler = tracked(offload, "lr_scheduler")
    else:
        made = lr_scheduler(offload.optimizer) if callable(lr_scheduler) else lr_scheduler
        offload.track(lr_scheduler=made)
        engine.lr_scheduler, engine.steps_scheduler = made, True
    return engine, offload.optimizer, loader, engine.lr_scheduler


def _source(args: Any, config: Any, config_params: Any) -> Any:
    source = configured_source(config_of(args, config, config_params))
    if source is None:
        raise ConfigError(
            "initialize: expected a configuration, got none. Pass config=, --deepspeed_config FILE,"
            " or run under `offload-train --config FILE`."
        )
    return source


def _optimizer(model: nn.Module, optimizer: Any, parameters: Any) -> tuple[Any, Any]:
    """What OffloadEngine takes as `optimizer` and `params`; an instance has its own groups."""
    if parameters is not None and not isinstance(parameters, torch.Tensor):
        parameters = list(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, None
    if optimizer is None or isinstance(optimizer, type | str):
        return optimizer, parameters
    if not callable(optimizer):
        raise ConfigError(
            f"initialize: expected an optimizer or a callable that makes one, got {optimizer!r}."
        )
    if parameters is None:
        parameters = [each for each in model.parameters() if each.requires_grad]
    return optimizer(parameters), None


def _loader(
    recipe: Recipe, data: Dataset[Any], collate_fn: Callable[..., Any] | None
) -> DataLoader[Any]:
    """Micro-batches in DeepSpeed's order: that of a DistributedSampler, seed 0, of one process."""
    micro = recipe.batch().micro
    if micro is None:
        raise ConfigError(
            "initialize: expected a batch size beside training_data, got none. Add"
            " train_micro_batch_size_per_gpu to the configuration."
        )
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    return DataLoader(
        data, batch_size=micro, sampler=sampler, collate_fn=collate_fn, drop_last=recipe.drop_last
    )


def _show_log() -> None:
    """Print what the engine says of itself, as DeepSpeed does, unless logging is set up."""
    logger = logging.getLogger("offload")
    if logging.root.handlers or logger.handlers:
        return
    stream = logging.StreamHandler()
    stream.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    logger.addHandler(stream)
    logger.setLevel(logging.INFO)
