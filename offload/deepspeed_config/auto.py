"""Fill what a file leaves open with "auto", as transformers does from its training arguments."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from offload.deepspeed_config.check import AUTO


def fill_auto(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` whose "auto" values are those of `values`, by dotted path.

        fill_auto(read("ds_config.json"), {
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
            "train_batch_size": 32, "gradient_clipping": 1.0, "bf16.enabled": True,
            "optimizer.params.lr": 1e-4, "optimizer.params.weight_decay": 0.1,
            "scheduler.params.warmup_num_steps": 100, **sizes_for(4096),
        })

    Values given explicitly stay; keys that are not in `config` are not added; an "auto" without a
    value stays and counts as absent.  `disagreements` tells where explicit values differ.
    """
    filled = copy.deepcopy(dict(config))
    for section, key, path in _places(filled, ""):
        if section[key] == AUTO and values.get(path) is not None:
            section[key] = values[path]
    return filled


def disagreements(
    config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Explicit values of `config` that differ from `values`, by dotted path: (its, theirs)."""
    found = {}
    for section, key, path in _places(dict(config), ""):
        wanted = values.get(path)
        if wanted is not None and section[key] not in (AUTO, None, wanted):
            found[path] = (section[key], wanted)
    return found


def sizes_for(hidden_size: int) -> dict[str, int]:
    """What transformers puts for "auto" into the sizes of ZeRO-3, in elements."""
    square = hidden_size * hidden_size
    return {
        "zero_optimization.reduce_bucket_size": square,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * square),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _places(section: dict[str, Any], prefix: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    for key, value in list(section.items()):
        path = prefix + str(key)
        if isinstance(value, dict):
            yield from _places(value, path + ".")
        else:
            yield section, key, path
