"""From `TrainingArguments` to the engine's settings, and what cannot be honoured.

    gradient_accumulation_steps, max_grad_norm      as they are
    bf16 / fp16 / neither                           dtype: "bf16" / "fp16" / the model's own
    optim, learning_rate, adam_*, optim_args        optimizer and its settings, through Trainer's
    weight_decay                                    two groups; biases and norms do not decay

`offload={...}` adds the settings of OffloadEngine that TrainingArguments has no word for.  With a
DeepSpeed file (trainer_file.py) its optimizer, types and placement replace these.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from offload.deepspeed_config.recipe import Recipe
from offload.errors import ConfigError

TORCH_OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"
)  # fmt: skip
_HERE = {  # settings that TrainingArguments has
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "lr_scheduler": "lr_scheduler_type, or optimizers=(None, scheduler)",
    "params": "create_optimizer",
    "device": "use_cpu",
}
_LOG = logging.getLogger(__name__)
_IMPLEMENTATIONS = {"fused", "foreach"}  # of the same arithmetic; the engine has its own


def check_offload(offload: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that belong to TrainingArguments, or would mislead it."""
    for key in offload:
        if key in _HERE:
            raise ConfigError(
                f"offload[{key!r}]: expected it in TrainingArguments, got it here."
                f" Set {_HERE[key]} there."
            )
    if offload.get("resume") not in (None, False):
        raise ConfigError(
            f"offload['resume']: expected False or nothing, got {offload['resume']!r}: steps and"
            " data would start anew. Use trainer.train(resume_from_checkpoint=...)."
        )
    if offload.get("read_only"):
        raise ConfigError("offload['read_only']: expected nothing, got True. Use OffloadEngine.")


def check_arguments(args: Any) -> None:
    """Raise ConfigError for arguments that would bypass the engine."""
    refused = {
        "torch_compile": "It would wrap the model; compile its blocks before instead",
        "fp16_full_eval": "Weights compute in one type. Use fp16=True",
        "bf16_full_eval": "Weights compute in one type. Use bf16=True",
        "fsdp": "The engine shards nothing",
        "auto_find_batch_size": "Memory is bounded by the budgets; choose a batch size",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments.{name}: expected it off, got {getattr(args, name)!r}. {why}."
            )
    if args.load_best_model_at_end and args.save_only_model:
        raise ConfigError(
            "TrainingArguments.load_best_model_at_end: expected save_only_model=False with it, got"
            " True: weights alone do not bring the masters back. Leave one of them out."
        )
    if args.deepspeed:
        raise ConfigError(
            "TrainingArguments.deepspeed: expected none, got a file for DeepSpeed itself. Use"
            " OffloadTrainingArguments, which give it to the engine."
        )
    if args.world_size > 1:
        raise ConfigError(
            f"OffloadTrainer: expected one process, got {args.world_size}. Start the script without"
            " a launcher."
        )


def engine_settings(
    model: nn.Module, args: Any, offload: Mapping[str, Any], *, file: Recipe | None
) -> dict[str, Any]:
    """Everything but the optimizer.  `file`: of DeepSpeed, filled."""
    norm = args.max_grad_norm or 0.0
    settings = {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": norm if 0 < norm < math.inf else 0.0,
        "dtype": _dtype(model, args, told=file is not None),
        "device": args.device,
        # The trainer steps the schedule.
        "config": None if file is None else replace(file, scheduler=None),
    }
    rest = {key: value for key, value in offload.items() if key not in ("optimizer", "config")}
    return {**settings, **rest}


def optimizer_settings(
    model: nn.Module, args: Any, chosen: Any, *, asked: tuple[Any, Any] | None
) -> dict[str, Any]:
    """The optimizer and its settings, but for the groups.

    `chosen`: of `offload`, or None.  `asked`: the trainer's `optimizer_cls_and_kwargs`.
    """
    if chosen is not None:
        return {"optimizer": chosen, "lr": args.learning_rate, **_of_adam(chosen, args)}
    if asked is not None:
        cls, settings = asked
    elif str(getattr(args.optim, "value", args.optim)) in TORCH_OPTIMIZERS:
        cls, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    else:
        raise ConfigError(
            f"TrainingArguments.optim: expected one of {', '.join(TORCH_OPTIMIZERS)}, got"
            f" {str(getattr(args.optim, 'value', args.optim))!r}. Name another with offload="
            "{'optimizer': ...}; for moments of eight bits keep adamw_torch and add"
            " {'state_dtype': 'int8'}."
        )
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer_cls_and_kwargs: expected a class of torch.optim.Optimizer, got {cls!r}."
        )
    kept = {key: value for key, value in settings.items() if key not in _IMPLEMENTATIONS}
    return {"optimizer": cls, **kept}


def _of_adam(chosen: Any, args: Any) -> dict[str, Any]:
    """adam_beta1, adam_beta2 and adam_epsilon, for an optimizer that has them."""
    name = chosen.lower() if isinstance(chosen, str) else chosen
    if name not in ("adam", "adamw", torch.optim.Adam, torch.optim.AdamW):
        return {}
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def tell_types(model: nn.Module, args: Any) -> None:
    """Say once what `bf16` and `fp16` mean here where transformers would mean something else."""
    flag = "bf16" if args.bf16 else "fp16"
    if not (args.bf16 or args.fp16):
        return
    if any(parameter.dtype is torch.float32 for parameter in model.parameters()):
        _LOG.warning(
            "%s=True: weights move in 16 bits beside exact fp32 masters, and compute in that type"
            " or in fp32, without the autocast that transformers' Trainer adds to fp32 weights.",
            flag,
        )


def _dtype(model: nn.Module, args: Any, *, told: bool) -> torch.dtype | None:
    """What moves: what the flags say, else a file (`told`), else the type of most of the model."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    if told:
        return None
    elems: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.dtype in (torch.float32, torch.bfloat16, torch.float16):
            elems[parameter.dtype] = elems.get(parameter.dtype, 0) + parameter.numel()
    return max(elems, key=lambda dtype: elems[dtype], default=torch.float32)
