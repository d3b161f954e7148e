"""Fallbacks are said once: a training run opens many files and queues in the same surroundings."""

from __future__ import annotations

import functools
import logging


@functools.cache
def tell_once(message: str) -> None:
    """Warn, unless this process has said so before."""
    logging.getLogger("aio").warning(message)
