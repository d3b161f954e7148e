"""`OffloadTrainer`: Hugging Face's Trainer with an engine under it.

    trainer = OffloadTrainer(model, args, train_dataset=data, offload={"nvme_path": "/mnt/nvme"})
    trainer.train();  trainer.evaluate();  trainer.save_model("out")
    trainer.train(resume_from_checkpoint=True)

    create_optimizer, evaluation   the engine takes the model over, once
    clip, norm                     the engine's; backward through `accelerate.attach`
    checkpoint-N/                  Trainer's files, and the engine's state in checkpoint-N/offload
    the model's placement          the engine's, never `model.to`

Data, schedules, logging, callbacks and evaluation are Trainer's own.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from offload.engine import outer_loop
from offload.engine.facade import OffloadEngine
from offload.engine.generation import capture_rng, restore_rng
from offload.errors import StateError
from offload.integrations.accelerate import (
    attach,
    check_complete,
    check_engine,
    has_engine,
    load_engine,
    save_engine,
)
from offload.integrations.trainer_engine import (
    FolderModel,
    file_of,
    make_engine,
    scratch_folder,
)
from offload.integrations.trainer_settings import check_arguments, check_offload
from offload.optim.schedules import scheduler_class

_LOG = logging.getLogger(__name__)
_SCHEDULER, _OPTIMIZER = "scheduler.pt", "optimizer.pt"  # Trainer's names


@dataclass
class OffloadTrainingArguments(TrainingArguments):
    """TrainingArguments whose `deepspeed` file the engine reads; DeepSpeed is not needed."""

    def __post_init__(self) -> None:
        self.deepspeed, self.deepspeed_file = None, self.deepspeed
        super().__post_init__()


class OffloadTrainer(Trainer):
    """A Trainer whose model, gradients and optimizer state live where an engine puts them."""

    optimizer: Any
    lr_scheduler: Any
    engine: OffloadEngine | None = None  # from the first train(), evaluate() or predict() on

    def __init__(
        self, model: nn.Module | str | os.PathLike[str] | None = None, args: Any = None,
        *rest: Any, offload: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """As Trainer's.  `offload`: settings of OffloadEngine, such as nvme_path and host_memory.

        What TrainingArguments has (clipping, accumulation, optimizer, types) comes from there.
        `model`: a folder of safetensors too, whose weights are never all in memory.
        Raises ConfigError for arguments that cannot be honoured.
        """
        self.offload = dict(offload or {})
        check_offload(self.offload)
        args = TrainingArguments("tmp_trainer") if args is None else args  # as Trainer does
        check_arguments(args)
        args._n_gpu = min(args.n_gpu, 1)  # or it would wrap the model for several devices
        self.loaded: FolderModel | None = None
        self._resuming = False  # from a checkpoint of ours, which replaces what a store holds
        if isinstance(model, str | os.PathLike):
            self.loaded = FolderModel(Path(model), scratch=scratch_folder(args, self.offload))
            model = self.loaded.model.module
        super().__init__(model, args, *rest, **settings)

    def close(self) -> None:
        """Commit the last step and release the store; may be called twice."""
        if self.engine is not None:
            self.engine.close()

    # --- Trainer's hooks

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """No GradScaler and no autocast beside the engine's types."""
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return {**found, "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine moves it."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The engine's optimizer, over Trainer's groups; takes the model over at the first call."""
        self._take_over()
        assert self.engine is not None
        self.engine.optimizer.zero_grad()  # of a run that was interrupted
        prepared: torch.optim.Optimizer = self.optimizer
        return prepared

    def _take_over(self) -> None:
        if self.engine is not None and self.engine.module is self.model:
            return
        self.close()  # model_init has made another model: the store is ours
        self.engine = make_engine(self, before=self.engine, replaced=self._resuming)
        _, self.optimizer = attach(self.accelerator, self.engine)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Trainer's, or the one that a DeepSpeed file names."""
        file = file_of(self, steps=num_training_steps)
        if self.lr_scheduler is None and file is not None and file.scheduler is not None:
            kind, params = file.scheduler
            made = scheduler_class(kind, params)(optimizer or self.optimizer, **params)
            self.lr_scheduler, self._created_lr_scheduler = made, True
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Give the model floats of the type that it computes in; labels keep theirs."""
        prepared = super()._prepare_inputs(inputs)
        if self.engine is None:
            return prepared
        dtype = outer_loop.compute_dtype(self.engine)
        return type(prepared)(
            {
                key: value if key in self.label_names else _with_floats(value, dtype)
                for key, value in prepared.items()
            }
        )

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """The norm before clipping; the engine clips in step()."""
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        assert self.engine is not None
        return outer_loop.grad_norm(self.engine) if grad_norm is None else grad_norm

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate through the engine, whether or not training has begun."""
        self._take_over()
        return super().evaluation_loop(*args, **kwargs)

    # --- checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        save_engine(self.engine, Path(output_dir))
        with warnings.catch_warnings():  # torch's, about saving a scheduler without its optimizer
            warnings.simplefilter("ignore")
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Weights come with the engine's state; weights alone go into the plain model."""
        folder = Path(resume_from_checkpoint)
        if has_engine(folder):
            check_complete(folder)  # before a store gives way to it
            self._resuming = True
            return
        if (folder / _OPTIMIZER).exists() or self.engine is not None:
            check_engine(folder)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_engine(Path(checkpoint)):
            return
        assert self.engine is not None
        load_engine(self.engine, Path(checkpoint))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        """Weights, and the optimizer with them, of the best checkpoint."""
        folder = self.state.best_model_checkpoint
        _LOG.info("loading the best model from %s (%s).", folder, self.state.best_metric)
        if self.engine is None:
            raise StateError("load_best_model_at_end: expected training before it, got none.")
        random_numbers = capture_rng()
        load_engine(self.engine, Path(folder))
        restore_rng(random_numbers)


def _with_floats(data: Any, dtype: torch.dtype) -> Any:
    """The same tensors, or nests of them, with floats of `dtype`."""
    if isinstance(data, Mapping):
        return type(data)({key: _with_floats(value, dtype) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple | list):
        return type(data)(_with_floats(value, dtype) for value in data)
    if isinstance(data, torch.Tensor) and data.is_floating_point():
        return data.to(dtype)
    return data
