"""The first generation: the model's own values, or what the store has committed."""

from __future__ import annotations

from typing import Any

import aio
from offload.engine.ledger import Ledger, follow
from offload.memory.slab import Region, Slots
from offload.partition.unit import Unit
from offload.runtime.initial import InitialWriter
from offload.runtime.persistent import PersistentState
from offload.runtime.source import InitialValues
from offload.store import checksum


def write_initial(
    ledger: Ledger, queue: aio.Queue, units: tuple[Unit, ...], persistent: PersistentState | None,
    *, memory: Region, chunk_elems: int, values: InitialValues,
) -> None:  # fmt: skip
    """Write the model's values as what `commit_first` makes generation 0.

    `memory`: 6 bytes for each of `chunk_elems` are enough.
    """
    store = ledger.store
    num_sides = store.manifest.num_sides
    digests: dict[str, int] = {}
    each = chunk_elems * max((unit.states.weights.num_bytes for unit in units), default=1)
    writer = InitialWriter(
        queue, Slots(memory, memory.num_bytes // each, each), values, chunk_elems=chunk_elems,
        # Frozen tensors are never written again, so each side needs them.
        sides=lambda unit: range(num_sides if unit.num_elems > unit.trainable_elems else 1),
        place=lambda unit, role, side: store.extent(unit.name, role, side),
    )  # fmt: skip
    for unit, sums in writer.write(units):
        digests[unit.name] = checksum.seal(store.files, unit.name, 0, sums)
    if persistent is not None:
        persistent.initialise()
        for side in range(num_sides):
            _transfer(ledger, queue.write, persistent, side, moments=False)
        name = persistent.unit.name
        digests[name] = ledger.sealer.seal_written(name, 0, moments=False)
    ledger.sealer.first = digests


def read_committed(
    ledger: Ledger, queue: aio.Queue, persistent: PersistentState | None
) -> None:  # fmt: skip
    """Take the committed generation: sides and flags of all units, state of the small tensors."""
    record = ledger.store.committed
    assert record is not None
    follow(ledger, record, ledger.units)
    if persistent is not None:
        persistent.initialise()
        read_persistent(ledger, queue, persistent)


def read_persistent(ledger: Ledger, queue: aio.Queue, persistent: PersistentState) -> None:
    """Read the small tensors' current state; moments that were never written are zero."""
    index = persistent.unit.index
    moments = index not in ledger.zero_moments
    if not moments:
        persistent.forget_moments()
    _transfer(ledger, queue.read, persistent, ledger.sides[index], moments=moments)


def _transfer(
    ledger: Ledger, move: Any, persistent: PersistentState, side: int, *, moments: bool
) -> None:
    name = persistent.unit.name
    persistent.transfer(
        move, lambda role: ledger.store.extent(name, role, side), moments=moments
    )  # fmt: skip
