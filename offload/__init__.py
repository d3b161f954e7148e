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

__all__ = [
    "BudgetError", "ConfigError", "OffloadEngine", "OffloadError", "StateError", "StoreCorrupt",
    "StoreError",
]  # fmt: skip
