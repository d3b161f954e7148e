"""A DeepSpeed file under a Trainer: "auto" is what TrainingArguments say, by transformers' rules.

explicit value == the argument's    taken
"auto"                              the argument's
explicit value != the argument's    ConfigError, with both
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from offload.deepspeed_config.auto import disagreements, fill_auto, sizes_for
from offload.deepspeed_config.recipe import Recipe, recipe_of
from offload.deepspeed_config.source import read
from offload.errors import ConfigError

_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size * gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 and adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "the number of steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}


def filled_recipe(source: Any, model: nn.Module, args: Any, *, steps: int | None) -> Recipe:
    """Read a file and fill its "auto"s; `steps`: of the whole training, None where not known.

    Raises ConfigError where the file and the arguments differ.
    """
    inline = isinstance(source, str) and source.lstrip().startswith("{")
    raw = read(json.loads(source) if inline else source)
    values = _values(args, steps)
    different = disagreements(raw, values)
    if different:
        lines = [
            f"{path}: {theirs!r}, but {_ARGUMENTS[path]} says {ours!r}"
            for path, (theirs, ours) in different.items()
        ]
        raise ConfigError(
            f"DeepSpeed file: expected what TrainingArguments say, got {'; '.join(lines)}."
            ' Write "auto" in the file, or change one of them.'
        )
    free = {"scheduler.params.warmup_min_lr": 0, **_sizes(model)}
    return recipe_of(fill_auto(raw, values | free))


def _values(args: Any, steps: int | None) -> dict[str, Any]:
    batch, window = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": window,
        "train_batch_size": batch * window,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "scheduler.params.warmup_num_steps": steps and args.get_warmup_steps(steps),
        "scheduler.params.total_num_steps": steps,
        "fp16.enabled": args.fp16,
        "bf16.enabled": args.bf16,
    }


def _sizes(model: nn.Module) -> dict[str, int]:
    """What "auto" means for sizes, where the model tells its width."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    widths = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or [])]
    found = [width for width in widths if width]
    return sizes_for(max(found)) if found else {}
