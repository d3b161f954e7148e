"""The errors a user sees.

Messages: what failed, on which named thing: expected A, got B. What to do.
"""


class OffloadError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A setting is unknown, contradictory or out of range."""


class BudgetError(OffloadError, MemoryError):
    """A memory or disk budget is too small; the message shows the least that works."""


class StoreError(OffloadError, OSError):
    """The store cannot be created, opened, locked or written."""


class StoreCorrupt(StoreError):
    """Data in the store is damaged; the message names the unit and the role."""


class StateError(OffloadError, RuntimeError):
    """A call came at a time, or on a tensor, where it has no meaning."""
