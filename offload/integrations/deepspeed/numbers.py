"""What a DeepSpeed script asks its engine: sizes, counts, rates, norms."""

from __future__ import annotations

from typing import Any

import torch

from offload.deepspeed_config.check import flatten
from offload.deepspeed_config.recipe import Recipe
from offload.engine.facade import OffloadEngine
from offload.engine.outer_loop import device
from offload.errors import ConfigError


class Choices:
    """What the configuration chose."""

    offload: OffloadEngine

    def fp16_enabled(self) -> bool:
        return self.offload.config.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.offload.config.dtype is torch.bfloat16

    def gradient_clipping(self) -> float:
        """The most that the global norm may be; 0: anything."""
        return self.offload.config.gradient_clipping

    def steps_per_print(self) -> int:
        return self.offload.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.offload.config.wall_clock_breakdown


class Numbers:
    """Read-only answers; steps count updates, skipped ones left out."""

    offload: OffloadEngine
    recipe: Recipe
    micro_steps: int
    local_rank = global_rank = 0
    world_size = 1

    def train_batch_size(self) -> int:
        """Samples of a step."""
        return self._known(self._batch().train, "train_batch_size")

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-step."""
        return self._known(self._batch().micro, "train_micro_batch_size_per_gpu")

    def gradient_accumulation_steps(self) -> int:
        return self.offload.config.gradient_accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """True where the next step() updates."""
        if not self.offload.config.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    @property
    def global_steps(self) -> int:
        return self.offload.global_step

    @property
    def global_samples(self) -> int:
        return self.global_steps * (self._batch().train or 1)

    @property
    def skipped_steps(self) -> int:
        return self.offload.skipped_steps

    @property
    def device(self) -> torch.device:
        return device(self.offload)

    def get_lr(self) -> list[float]:
        """Of the next step, a value for each parameter group."""
        return [float(group["lr"]) for group in self.offload.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Betas, or SGD's momentum, of each parameter group."""
        groups = self.offload.optimizer.param_groups
        return [group["betas"] if "betas" in group else group.get("momentum") for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Unscaled, before clipping, of the last step; None before the first."""
        return self.offload.grad_norm

    def loss_scale(self) -> float:
        """Of fp16; 1 with other types."""
        return self.offload.scale.value

    def zero_optimization_stage(self) -> int:
        """As the file has it; all stages are placed alike here."""
        return int(flatten(self.recipe.raw)[0].get("zero_optimization.stage", 0))

    def _batch(self) -> Any:
        return self.recipe.batch(self.gradient_accumulation_steps())

    def _known(self, value: int | None, key: str) -> int:
        if value is None:
            raise ConfigError(
                f"{key}: expected it in the configuration, got no batch size. Add train_batch_size"
                " or train_micro_batch_size_per_gpu."
            )
        return value
