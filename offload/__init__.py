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
from offload.interchange.on_disk import on_disk_init

__all__ = [
    "BudgetError", "ConfigError", "OffloadEngine", "OffloadError", "StateError", "StoreCorrupt",
    "StoreError", "on_disk_init",
]  # fmt: skip
