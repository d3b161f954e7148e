"""Every key of a DeepSpeed file with a value, from `every_key.hjson`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.deepspeed_config import hjson

SECTIONS_OF_ONE_KEY = ("optimizer", "scheduler", "fp16", "bf16", "torch_autocast", "data_types",
                       "aio", "checkpoint", "csv_monitor", "zero_optimization",
                       "zero_optimization.offload_param",
                       "zero_optimization.offload_optimizer")  # fmt: skip


def every_key() -> dict[str, Any]:
    """Values by dotted path; what has keys of its own that matter is taken apart."""
    text = Path(__file__).with_name("every_key.hjson").read_text(encoding="utf-8")
    return dict(_leaves(hjson.loads(text), ""))


def _leaves(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        path = prefix + key
        if path in SECTIONS_OF_ONE_KEY:
            yield from _leaves(value, path + ".")
        else:
            yield path, value


def nested(path: str, value: Any) -> dict[str, Any]:
    """A configuration that holds one key."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value
