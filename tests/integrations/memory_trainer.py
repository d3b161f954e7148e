"""The oracle as a Trainer: all in memory, torch's autograd, our kernel as the update.

Everything but the update, the clipping and the rounding of gradients is Trainer's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from oracle import Group, Oracle, _norm
from tiny_lm import transformers

DECAYING = Group("weight")
NO_DECAY = (Group("norm"), Group("bias"))  # of what Trainer lets not decay, in a Llama


class OracleOptimizer(torch.optim.Optimizer):
    """Steps the oracle with the learning rate that the scheduler has set."""

    def __init__(self, oracle: Oracle, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.oracle = oracle

    def step(self, closure: Any = None) -> None:
        lr = self.param_groups[0]["lr"]
        self.oracle.groups = tuple(replace(group, lr=lr) for group in self.oracle.groups)
        self.oracle.step()


class MemoryTrainer(transformers.Trainer):
    def __init__(self, model: Any, args: Any, *, dtype: torch.dtype, **settings: Any) -> None:
        plain = tuple(replace(group, weight_decay=0.0) for group in NO_DECAY)
        decay = replace(DECAYING, weight_decay=args.weight_decay)
        self.oracle = Oracle(
            model, dtype, torch.float32, groups=(*plain, decay), clipping=args.max_grad_norm
        )
        super().__init__(model, args, **settings)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def create_optimizer(self, model: Any = None) -> Any:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OracleOptimizer(self.oracle, parameters, self.args.learning_rate)
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.oracle.keep_gradients()
        return loss

    def _clip_grad_norm(self, model: Any) -> float:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        live = [state for state in self.oracle.states.values() if state.kept is not None]
        return _norm(live) if grad_norm is None else grad_norm
