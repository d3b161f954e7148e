"""`config=`: a DeepSpeed file beside keyword arguments.

keyword arguments  >  the command line  >  the file  >  defaults

optimizer, lr_scheduler    an argument replaces the file's section, and that is told
batch numbers              the argument gradient_accumulation_steps replaces the file's; the
                           three numbers must agree all the same
lr, betas, ... dtype ...   an argument replaces the file's value
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.config import make_config
from offload.deepspeed_config.batch import STEPS
from offload.deepspeed_config.optimizers import NamedOptimizer
from offload.deepspeed_config.recipe import Recipe, recipe_of
from offload.engine.after_step import AfterStep
from offload.engine.inputs import autocast_forward, cast_inputs
from offload.errors import ConfigError
from offload.optim.adam import AdamRule
from offload.optim.choice import KERNEL_RULES
from offload.optim.schedules import scheduler_class

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine

VARIABLE = "OFFLOAD_CONFIG"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Configured:
    """What an engine is made of, and what is done with it when it is."""

    optimizer: Any
    settings: Mapping[str, Any]  # keyword arguments, over those of the file's optimizer
    under: Mapping[str, Any]  # the file's, below the command line
    recipe: Recipe | None
    scratch: tempfile.TemporaryDirectory[str] | None  # where no folder is named or needed
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None
    notes: tuple[str, ...]

    def attach(self, engine: OffloadEngine, lr_scheduler: Any) -> None:
        """Tell what is different; make what the file asks for; track the scheduler."""
        for note in self.notes:
            _LOG.warning("config: %s", note)
        stepped = None
        if lr_scheduler is None and self.make_scheduler is not None:
            lr_scheduler = stepped = self.make_scheduler(engine.optimizer)
        if lr_scheduler is not None:
            engine.track(lr_scheduler=lr_scheduler)
        if self.recipe is None:
            return
        after = AfterStep(weakref.ref(engine), self.recipe, stepped)
        engine.optimizer.register_step_pre_hook(after.before)
        engine.optimizer.register_step_post_hook(after.after)
        blueprint = engine._parts.ground.blueprint
        attached = engine._parts.ground.attached
        if self.recipe.autocast is not None:
            dtype = getattr(torch, self.recipe.autocast)
            attached.callback(autocast_forward(engine.module, blueprint.device.type, dtype))
        if self.recipe.cast_inputs:
            attached.callback(cast_inputs(engine.module, blueprint.compute_dtype))


def configure(
    source: Any, optimizer: Any, settings: Mapping[str, Any], *, lr_scheduler: Any = None,
    environment: Mapping[str, str] = os.environ,
) -> Configured:  # fmt: skip
    """Read what `source` or the command line names, if anything; raises ConfigError."""
    settings = {key: value for key, value in settings.items() if value is not None}
    source = configured_source(source, environment)
    if source is None:
        return Configured(optimizer or "adamw", settings, {}, None, None, None, ())
    recipe = recipe_of(source)
    under = dict(recipe.settings)
    under[STEPS] = recipe.batch(settings.get(STEPS)).steps
    notes = {key: text for key, text in recipe.notes.items() if key not in settings}
    if optimizer is not None and recipe.optimizer is not None:
        notes["optimizer"] = "the optimizer given as an argument replaces the file's"
    elif recipe.optimizer is not None:
        optimizer = _optimizer(recipe.optimizer)
        settings = {**recipe.optimizer.settings, **settings}
    make_scheduler = _scheduler(recipe)
    if lr_scheduler is not None and make_scheduler is not None:
        notes["scheduler"] = "the lr_scheduler given as an argument replaces the file's"
    scratch = _scratch(recipe, settings, environment)
    if scratch is not None:
        under |= {"nvme_path": scratch.name, "durability": "none"}
        notes["nvme_path"] = (
            f"no folder is named and nothing shall live on disk: the store is {scratch.name}, which"
            " is removed at the end. Name one with nvme_path= or offload-train --nvme DIR"
        )
    return Configured(
        optimizer or "adamw", settings, under, recipe, scratch, make_scheduler,
        tuple(notes.values()),
    )  # fmt: skip


def configured_source(source: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """`source`, or what the command line names; None: nothing."""
    return source if source is not None else environment.get(VARIABLE)


def store_folder(settings: Mapping[str, Any]) -> Path:
    """The first folder of an engine with these keyword arguments; raises ConfigError.

    Where none is named nor needed, the system's folder for temporary files.
    """
    source = configured_source(settings.get("config"))
    recipe = recipe_of(source) if source is not None else None
    given = {key: value for key, value in settings.items() if value is not None}
    if recipe is not None and _unnamed(recipe, given, os.environ):
        return Path(tempfile.gettempdir())
    under = recipe.settings if recipe is not None else {}
    paths = {key: under[key] for key in ("nvme_path",) if key in under}
    return make_config({"nvme_path": settings.get("nvme_path")}, under=paths).nvme_path[0]


def _scratch(
    recipe: Recipe, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> tempfile.TemporaryDirectory[str] | None:
    """A folder for a store that nobody named; None: one is named.  Raises where one must be."""
    if not _unnamed(recipe, settings, environment):
        return None
    return tempfile.TemporaryDirectory(prefix="offload-", ignore_cleanup_errors=True)


def _unnamed(recipe: Recipe, settings: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """True where nobody names a folder; raises where one must be."""
    if "nvme_path" in {**settings, **recipe.settings} or environment.get("OFFLOAD_NVME"):
        return False
    if recipe.needs_disk:
        raise ConfigError(
            "config, zero_optimization: nvme_path: expected a folder beside device nvme, got none."
            " Add it to offload_param or offload_optimizer, pass nvme_path=, or run under"
            " `offload-train --nvme DIR`."
        )
    return True


def _optimizer(named: NamedOptimizer) -> Any:
    """A name with kernels, a rule, or a class of torch.optim."""
    if not named.bias_correction:
        return AdamRule(decoupled=named.kind == "adamw", corrected=False)
    name = named.kind.lower()
    if name in KERNEL_RULES and name != "sgd":  # whose settings torch's class checks
        return name
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    cls = classes.get(name)
    if cls is None or cls is torch.optim.Optimizer:
        near = difflib.get_close_matches(name, [*KERNEL_RULES, *classes], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " Take 'AdamW'."
        raise ConfigError(
            f"config, optimizer.type: expected Adam, AdamW, Lion, Adagrad or a class of"
            f" torch.optim, got {named.kind!r}.{hint}"
        )
    known = list(inspect.signature(cls).parameters)[1:]
    for key in named.settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(
                f"config, optimizer.params: {named.kind} has no setting {key!r}. {hint}"
            )
    return cls


def _scheduler(recipe: Recipe) -> Callable[[torch.optim.Optimizer], Any] | None:
    if recipe.scheduler is None:
        return None
    kind, params = recipe.scheduler
    cls = scheduler_class(kind, params)
    return lambda optimizer: cls(optimizer, **params)
