"""The engine of a Trainer: its file, its groups, its optimizer, its settings.

An instance of the user's > offload["optimizer"] > optimizer_cls_and_kwargs > a file's > args'.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from offload.deepspeed_config.recipe import Recipe
from offload.engine import outer_loop
from offload.engine.configured import configured_source, store_folder
from offload.engine.facade import OffloadEngine
from offload.errors import ConfigError
from offload.integrations.trainer_file import filled_recipe
from offload.integrations.trainer_settings import (
    engine_settings,
    optimizer_settings,
    tell_types,
)
from offload.interchange.pretrained import open_pretrained
from offload.runtime.source import LoadedModel

_EXISTING = (
    "trainer.train(resume_from_checkpoint=...) goes on from a checkpoint and replaces it. Discard"
    " it (offload={'resume': False}, offload-train --fresh), or give this job another name"
    " (offload={'name': ...})."
)


class FolderModel:
    """A model whose weights are in files, until somebody writes to them or replaces them."""

    def __init__(self, folder: Path, *, scratch: Path) -> None:
        self.model = open_pretrained(folder, scratch=scratch)
        self._states = self._now()

    def as_it_is(self) -> LoadedModel:
        """The model, and the files of the weights that are still what the files hold."""
        now = self._now()
        places = {
            name: place
            for name, place in self.model.places.items()
            if now.get(name) == self._states[name]
        }
        return LoadedModel(self.model.module, places)

    def _now(self) -> dict[str, tuple[int, int, int]]:
        named = self.model.module.named_parameters()
        return {name: (id(p), p.data_ptr(), p._version) for name, p in named}


def make_engine(
    trainer: Any, *, before: OffloadEngine | None, replaced: bool = False
) -> OffloadEngine:
    """Take over the model of an OffloadTrainer; in the store of the engine that it had before.

    `replaced`: a checkpoint will be loaded, so that a store of another run may go.
    Raises ConfigError, BudgetError or StoreError; then nothing is taken over.
    """
    file = file_of(trainer)
    tell_types(trainer.model, trainer.args)
    settings = engine_settings(trainer.model, trainer.args, trainer.offload, file=file)
    settings |= {"existing_store": _EXISTING, **_optimizer(trainer, file)}
    if before is not None:
        settings |= {"resume": False, "name": outer_loop.name_of(before)}
    elif replaced:
        settings["resume"] = False
    loaded = trainer.loaded
    known = loaded is not None and loaded.model.module is trainer.model
    engine = OffloadEngine(loaded.as_it_is() if known else trainer.model, **settings)
    if engine.resumed:
        engine.close()
        raise ConfigError(
            "OffloadTrainer: expected a new store, got one to resume (--resume): steps and data"
            " would start anew. Leave --resume out: trainer.train(resume_from_checkpoint=...) goes"
            " on, --fresh starts anew."
        )
    return engine


def file_of(trainer: Any, *, steps: int | None = None) -> Recipe | None:
    """The DeepSpeed file of the arguments, of `offload` or of the command line, filled.

    `steps`: of the whole training, where they are known.
    """
    source = _source(trainer.args, trainer.offload)
    if source is None:
        return None
    return filled_recipe(source, trainer.model, trainer.args, steps=steps)


def scratch_folder(args: Any, offload: Mapping[str, Any]) -> Path:
    """Where a model that is read from files may put what they do not hold as it is needed."""
    source = _source(args, offload)
    # The model is not there yet, and only sizes that are no concern here depend on it.
    file = None if source is None else filled_recipe(source, nn.Module(), args, steps=None)
    return store_folder({"nvme_path": offload.get("nvme_path"), "config": file})


def _source(args: Any, offload: Mapping[str, Any]) -> Any:
    return configured_source(getattr(args, "deepspeed_file", None) or offload.get("config"))


def _optimizer(trainer: Any, file: Recipe | None) -> dict[str, Any]:
    if trainer.optimizer is not None:
        return {"optimizer": trainer.optimizer}
    chosen, asked = trainer.offload.get("optimizer"), trainer.optimizer_cls_and_kwargs
    if file is not None and file.optimizer is not None and chosen is None and asked is None:
        return {}
    found = optimizer_settings(trainer.model, trainer.args, chosen, asked=asked)
    return {"params": _groups(trainer), **found}


def _groups(trainer: Any) -> list[dict[str, Any]]:
    """Trainer's two: what decays and what does not."""
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            members[name in decaying].append(parameter)
    return [
        {"params": members[True], "weight_decay": trainer.args.weight_decay},
        {"params": members[False], "weight_decay": 0.0},
    ]
