"""Describe updates to the pipeline.

rows (hyper-parameters)  +  units (layout, sides, kept gradients)  --submit-->  UpdateJob
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offload.engine.ledger import Ledger
from offload.optim.chunks import StreamPlace, UnitTemplate, stack
from offload.optim.jobs import Job, Pipeline
from offload.optim.pipeline import UPDATE_ROLES
from offload.partition.states import MOMENTS, Role
from offload.partition.unit import Unit
from offload.runtime.gradients import GradientKeeper, KeptUnit
from offload.runtime.persistent import PersistentState
from offload.runtime.resident import ResidentBuffers


@dataclass(frozen=True)
class Rows:
    """Hyper-parameters of an update: one row per group and step count, and the row of each name."""

    table: NDArray[Any]
    row_of: Mapping[str, int]

    def of(self, unit: Unit) -> dict[str, bytes]:
        """The rows of a unit's tensors, comparable between two tables."""
        return {
            slot.tensor.name: self.table[self.row_of[slot.tensor.name]].tobytes()
            for slot in unit.slots
            if slot.tensor.name in self.row_of
        }


class UpdateBuilder:
    """Describes jobs to the pipeline; what does not change from step to step is kept."""

    def __init__(
        self, pipeline: Pipeline, ledger: Ledger, keeper: GradientKeeper,
        persistent: PersistentState | None, *, resident: ResidentBuffers, chunk_elems: int,
    ) -> None:  # fmt: skip
        self._pipeline = pipeline
        self._ledger = ledger
        self._keeper = keeper
        self._persistent = persistent
        self.resident = resident
        self._chunk_elems = chunk_elems
        self._templates: dict[tuple[int, int, bool, torch.dtype, bool, bool], UnitTemplate] = {}

    def submit(
        self, units: Sequence[Unit], rows: Rows, *, urgency: Callable[[Unit], int], released: bool,
        weights: Sequence[int] = (),
    ) -> Job:  # fmt: skip
        """Submit one job; `urgency(unit)`: place of the unit's next use, smaller is sooner.

        `weights`: HOST addresses of the first chunks' weights, left as they are; the others are
        read (one unit only).
        """
        written = [unit.name for unit in units if self._writes(unit)]
        if written:
            self._ledger.store.begin(written)
        metrics = self._ledger.metrics
        with metrics.stall("reload"):
            reloaded = self.resident.reload(unit.index for unit in units)
        for role, num_bytes in reloaded.items():
            metrics.read_bytes[f"update.{role.value}"] += num_bytes
        parts, files = [], []
        for number, unit in enumerate(units):
            template = self._template(unit, ahead=not released)
            # Fetches of the coming step, which compute waits for, go before its updates.
            deadline = self._ledger.next_deadline() + 3 + urgency(unit)
            part = template.fill(unit_index=number, deadline=deadline, rows=rows.row_of)
            if self.resident.region(unit.index, Role.PARAM) is None:
                _lend(part[0], weights, self._chunk_elems, unit.states.weights.lent)
            parts.append(part)
            files.append(template.files)
        return self._pipeline.submit(
            *stack(parts), rows.table, np.full(len(units), released, np.uint8),
            unit_names=[unit.name for unit in units], keep_alive=files, checksums=True,
            timed=metrics.timeline is not None,
        )  # fmt: skip

    def _writes(self, unit: Unit) -> bool:
        return not all(self._ledger.write_back.leaves(unit.index, role) for role in unit.roles)

    def _template(self, unit: Unit, *, ahead: bool) -> UnitTemplate:
        side = self._ledger.sides[unit.index]
        zero = unit.index in self._ledger.zero_moments
        kept = self._keeper[unit.index]
        key = (unit.index, side, zero, kept.dtype, ahead, self.resident.turn(unit.index))
        template = self._templates.get(key)
        # A side that a checkpoint shares has got another file.
        if template is None or any(file.closed for file in template.files):
            streams = {role: self._state_place(unit, role, zero, ahead) for role in unit.roles}
            streams[Role.GRAD] = _grad_place(kept)
            template = UnitTemplate.of(unit, chunk_elems=self._chunk_elems, streams=streams)
            self._templates[key] = template
        return template

    def _state_place(self, unit: Unit, role: Role, zero: bool, ahead: bool) -> StreamPlace:
        read = self._ledger.store.extent(unit.name, role, self._ledger.sides[unit.index])
        write = self._ledger.store.extent(unit.name, role, self._ledger.next_side(unit.index))
        left = self._ledger.write_back.leaves(unit.index, role)
        to = None if left else (write.file, write.offset)
        if self._persistent is not None and unit is self._persistent.unit:
            return StreamPlace(host_address=self._persistent.region(role).address, write=to)
        here = self.resident.region(unit.index, role)
        copy = self.resident.copy(unit.index, role) if ahead else None
        if here is not None and copy is not None:
            return StreamPlace(
                host_address=copy.address, source_address=here.address, write=to
            )  # fmt: skip
        if here is not None:
            return StreamPlace(host_address=here.address, write=to)
        if (zero and role in MOMENTS) or role in unit.states.weights.made:
            return StreamPlace(write=to)
        return StreamPlace(read=(read.file, read.offset), write=to)


def _lend(
    chunks: NDArray[np.void], weights: Sequence[int], chunk_elems: int, roles: Sequence[Role]
) -> None:
    """Let the first chunks take `roles` of 2 bytes from memory: a fetch slot holds one by one.

    A chunk of the update lies within one chunk of the weights.
    """
    starts = np.cumsum(chunks["num_elems"], dtype=np.int64) - chunks["num_elems"]
    slots, within = np.divmod(starts, chunk_elems)
    count = int(np.count_nonzero(slots < len(weights)))
    if not count:
        return
    addresses = np.array(weights, np.uint64)[slots[:count]]
    for number, role in enumerate(roles):
        stream = chunks["streams"][:count, UPDATE_ROLES.index(role)]
        offsets = (2 * (chunk_elems * number + within[:count])).astype(np.uint64)
        stream["source"] = addresses + offsets


def _grad_place(kept: KeptUnit) -> StreamPlace:
    name = str(kept.dtype).removeprefix("torch.")
    if kept.spill is not None:
        return StreamPlace.grad(name, read=(kept.spill.file, 0), after_release=True)
    assert kept.region is not None
    return StreamPlace.grad(name, host_address=kept.region.address)
