"""What a DeepSpeed file asks for after each optimizer step: schedule, lines in the log, CSV files.

A skipped step, or one without gradients, is none: the global step shows it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.deepspeed_config.recipe import CsvFiles, Recipe
from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine

_LOG = logging.getLogger(__name__)


class AfterStep:
    """Hooks of the optimizer; holds its engine weakly, as the optimizer does."""

    def __init__(
        self, engine: weakref.ref[OffloadEngine], recipe: Recipe, scheduler: Any
    ) -> None:  # fmt: skip
        """`scheduler`: stepped here; None: nobody's, or the caller's."""
        self._engine = engine
        self._scheduler = scheduler
        self._every = recipe.report_every
        self._recipe = recipe
        self._csv = CsvMonitor(recipe.csv) if recipe.csv is not None else None
        self._before = 0

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        engine = self._engine()
        assert engine is not None
        self._before = engine.global_step

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        engine = self._engine()
        assert engine is not None
        if engine.global_step == self._before:
            return
        used = [float(group["lr"]) for group in optimizer.param_groups]
        if self._scheduler is not None:
            self._scheduler.step()
        if self._every is not None and engine.global_step % self._every == 0:
            momenta = [
                group.get("betas", group.get("momentum")) for group in optimizer.param_groups
            ]
            _LOG.info(
                "step %d: skipped %d, lr %s, momentum %s, gradient norm %.6g",
                engine.global_step, engine.skipped_steps, used, momenta, engine.grad_norm,
            )  # fmt: skip
        if self._csv is not None:
            values = {"lr": used[0], "grad_norm": engine.grad_norm or 0.0}
            if engine.scale.enabled:
                values["loss_scale"] = engine.scale.value
            samples = self._recipe.batch(engine.config.gradient_accumulation_steps).train or 1
            self._csv.write(engine.global_step * samples, values)


class CsvMonitor:
    """`csv_monitor`: a file for each quantity, samples seen and value a line."""

    def __init__(self, files: CsvFiles) -> None:
        """Raises ConfigError where the folder cannot be made."""
        self._folder = Path(files.folder) / files.job
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"config, csv_monitor.output_path: expected a folder that can be written, got"
                f" {self._folder}: {error.strerror}."
            ) from error

    def write(self, samples: int, values: Mapping[str, float]) -> None:
        """Add a line to each file; a file that is new begins with its columns."""
        for name, value in values.items():
            path = self._folder / f"Train_Samples_{name}.csv"
            with path.open("a") as file:
                if not file.tell():
                    file.write(f"step,{name}\n")
                file.write(f"{samples},{value!r}\n")
