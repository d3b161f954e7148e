"""Train models larger than the machine: see `OffloadEngine`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.errors import (
    BudgetError,
    ConfigError,
    OffloadError,
    StateError,
    StoreCorrupt,
    StoreError,
)

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine
    from offload.integrations.deepspeed import zero
    from offload.integrations.deepspeed.arguments import add_config_arguments, init_distributed
    from offload.integrations.deepspeed.engine import DeepSpeedEngine
    from offload.integrations.deepspeed.initialize import initialize
    from offload.interchange.on_disk import on_disk_init

__all__ = [
    "BudgetError", "ConfigError", "DeepSpeedEngine", "OffloadEngine", "OffloadError", "StateError",
    "StoreCorrupt", "StoreError", "add_config_arguments", "init_distributed", "initialize",
    "on_disk_init", "zero",
]  # fmt: skip

# Loaded when first used: `offload-train` sets the environment before torch reads it.
_PLACES = {
    "OffloadEngine": "offload.engine.facade",
    "DeepSpeedEngine": "offload.integrations.deepspeed.engine",
    "add_config_arguments": "offload.integrations.deepspeed.arguments",
    "init_distributed": "offload.integrations.deepspeed.arguments",
    "initialize": "offload.integrations.deepspeed.initialize",
    "on_disk_init": "offload.interchange.on_disk",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        found = getattr(import_module(_PLACES[name]), name)
    elif name == "zero":
        found = import_module("offload.integrations.deepspeed.zero")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # next time it is found at once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
