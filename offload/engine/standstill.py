"""Replace the whole state of a living engine: stop everything, exchange it, go on.

stop(parts) -> write the spare sides -> commit -> refresh(parts)
"""

from __future__ import annotations

from offload.engine.connect import Parts
from offload.engine.loading import read_persistent


def stop(parts: Parts) -> None:
    """Finish the pending step; drop gradients, prefetches and what was updated in advance."""
    parts.ground.ledger.finish()
    parts.hooks.abort()
    parts.speculator.discard()
    parts.lent.clear()
    parts.residency.discard_prefetches()
    parts.residency.evict_unused()


def refresh(parts: Parts) -> None:
    """Give memory what was committed: the small tensors, and what is resident."""
    ground = parts.ground
    for bound in parts.residency.bound:
        bound.outdate()
    ground.resident.rewritten(unit.index for unit in ground.blueprint.units)
    if ground.persistent is not None:
        read_persistent(ground.ledger, ground.queue, ground.persistent)
        ground.persistent.refresh(ground.device)
