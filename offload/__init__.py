"""Train models larger than the machine: see `OffloadEngine`."""

from offload.engine.facade import OffloadEngine
from offload.errors import (
    BudgetError,
    ConfigError,
    OffloadError,
    StateError,
    StoreCorrupt,
    StoreError,
)
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
