"""Generations that no step made: the initial weights, edits, loaded checkpoints.

data written and waited for -> checksums -> commit -> the ledger follows
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from offload.engine.interrupts import uninterrupted
from offload.engine.ledger import Ledger
from offload.store.format import UnitFlag


def commit_first(ledger: Ledger, payload: bytes) -> None:
    """Make the initial weights, with the engine's state, generation 0; moments are zero."""
    sides = {unit.name: 0 for unit in ledger.units.values()}
    ledger.store.begin()
    ledger.store.commit(
        sides=sides, generation=0, payload=payload, checksums=ledger.sealer.first,
        flags=dict.fromkeys(sides, UnitFlag.MOMENTS_ZERO),
    )  # fmt: skip


def commit_rewritten(
    ledger: Ledger, sides: Mapping[str, int], payload: bytes, *,
    zero_moments: Collection[int] | None = None, checksums: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Commit units that were written whole to `sides` as the next generation.

    `zero_moments`: units whose moments are zero and not written (None: as they were).
    `checksums`: digests of their filled checksum extents; None: they are read back.
    """
    zero = ledger.zero_moments if zero_moments is None else zero_moments
    written = [unit for unit in ledger.units.values() if unit.name in sides]
    if checksums is None:
        checksums = {
            unit.name: ledger.sealer.seal_written(
                unit.name, sides[unit.name], moments=unit.index not in zero
            )
            for unit in written
        }
    ledger.sealer.forget()
    flags = {}
    for unit in written:
        flags[unit.name] = UnitFlag.MOMENTS_ZERO if unit.index in zero else UnitFlag(0)
        if unit.num_elems > unit.trainable_elems:  # frozen tensors: on one side only yet
            flags[unit.name] |= UnitFlag.SPARE_STALE
    with uninterrupted():
        ledger.store.commit(
            sides=sides, generation=ledger.generation + 1, payload=payload, flags=flags,
            checksums=checksums,
        )  # fmt: skip
        ledger.write_back.forget()
        ledger.sides.update({unit.index: sides[unit.name] for unit in written})
        ledger.zero_moments = set(zero)
