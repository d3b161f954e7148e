"""One optimizer step: decide, submit, hand over.

finish the previous generation (its commit must be there before the first write)
norm and finiteness of this step's gradients  -> skip, or the clip factor
rows of hyper-parameters                      -> one per group and step count
chunks of every unit that got a gradient      -> the update pipeline, in order of next use
refresh the small tensors; the others are waited for when they are fetched
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.engine.ledger import Ledger, Pending
from offload.metrics import Metrics
from offload.optim.adamw import StepCounts
from offload.optim.chunks import StreamPlace, UnitTemplate, stack
from offload.optim.pipeline import UpdatePipeline
from offload.partition.unit import STATE_ROLES, Role, Unit
from offload.runtime.gradients import GradientKeeper, KeptUnit
from offload.runtime.persistent import PersistentState

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Outcome:
    """What a step decided."""

    grad_norm: float
    skipped: bool
    updated: tuple[str, ...]  # parameters


@dataclass(frozen=True)
class StepRules:
    """What stays the same from step to step."""

    chunk_elems: int
    max_norm: float  # 0: no clipping


class Stepper:
    """Turns kept gradients into a submitted generation."""

    def __init__(
        self, units: Sequence[Unit], persistent: PersistentState | None, *,
        names: Sequence[str], rules: StepRules, ledger: Ledger, keeper: GradientKeeper,
        pipeline: UpdatePipeline, counts: StepCounts, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._units = [*units, *([persistent.unit] if persistent else [])]
        self._persistent = persistent
        self._names = names  # named_parameters() order, the order of the norm
        self._rules = rules
        self._ledger = ledger
        self._keeper = keeper
        self._pipeline = pipeline
        self._counts = counts
        self._metrics = metrics
        self._templates: dict[tuple[int, int, bool, torch.dtype], UnitTemplate] = {}
        self._norm_index = {
            slot.tensor.name: keeper[unit.index].index_of[slot.tensor.name]
            for unit in self._units
            for slot in unit.slots
        }

    def step(
        self, groups: Sequence[Mapping[str, Any]],
        names_of: Callable[[Mapping[str, Any]], list[str]],
        *, order: Sequence[int], capture: Callable[[], dict[str, Any]],
    ) -> Outcome:  # fmt: skip
        """Update what got a gradient; returns before the disk is done.

        `order`: units by next use.  `names_of`: the parameters of a group, by name.
        """
        self._ledger.finish()
        self._keeper.settle()
        with_grad = self._with_grad()
        norm, finite = self._norm(with_grad)
        if not finite or not with_grad:
            self._keeper.clear()
            self._metrics.skipped_steps += not finite
            return Outcome(norm, not finite, ())
        factor = min(1.0, self._rules.max_norm / (norm + 1e-6)) if self._rules.max_norm else 1.0
        wanted = [(group, [n for n in names_of(group) if n in with_grad]) for group in groups]
        rows, row_of = self._counts.next_rows(wanted, grad_scale=factor)
        if row_of:
            self._counts.advance(row_of)
            self._submit(rows, row_of, order, capture)
        self._keeper.clear()
        return Outcome(norm, False, tuple(row_of))

    def _with_grad(self) -> set[str]:
        return set().union(*(self._keeper[unit.index].has_grad for unit in self._units))

    def _norm(self, with_grad: set[str]) -> tuple[float, bool]:
        """Global norm in named_parameters() order, and whether every gradient is finite."""
        table = self._keeper.norm
        indices = [self._norm_index[name] for name in self._names if name in with_grad]
        norm = math.sqrt(sum(table.value(index) for index in indices))
        return norm, not any(table.nonfinite(index) for index in indices)

    def _submit(
        self, rows: np.ndarray[Any, Any], row_of: Mapping[str, int], order: Sequence[int],
        capture: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        position = {unit: place for place, unit in enumerate(order)}
        if self._persistent is not None:
            position[self._persistent.unit.index] = -1  # waited for at once
        updated = [
            unit
            for unit in self._units
            if any(slot.tensor.name in row_of for slot in unit.slots if slot.tensor.trainable)
        ]
        updated.sort(key=lambda unit: position.get(unit.index, len(position)))
        self._ledger.store.begin()
        parts, files = [], []
        for number, unit in enumerate(updated):
            template = self._template(unit)
            deadline = self._ledger.next_deadline() + 3 + number  # fetches of the step go first
            parts.append(template.fill(unit_index=number, deadline=deadline, rows=row_of))
            files.append(template.files)
        job = self._pipeline.submit(
            *stack(parts), rows, np.ones(len(updated), np.uint8),
            unit_names=[unit.name for unit in updated], keep_alive=files,
        )  # fmt: skip
        self._ledger.submit(Pending(
            job, {unit.index: number for number, unit in enumerate(updated)},
            {unit.name: 1 - self._ledger.sides[unit.index] for unit in updated},
            self._ledger.generation + 1, {},
        ))  # fmt: skip
        if self._persistent is not None and self._persistent.unit in updated:
            self._ledger.wait(self._persistent.unit.index)
        self._ledger.describe_pending(capture())

    def _template(self, unit: Unit) -> UnitTemplate:
        side = self._ledger.sides[unit.index]
        zero = unit.index in self._ledger.zero_moments
        kept = self._keeper[unit.index]
        key = (unit.index, side, zero, kept.dtype)
        if key not in self._templates:
            streams = {role: self._state_place(unit, role, side, zero) for role in STATE_ROLES}
            streams[Role.GRAD] = _grad_place(kept)
            self._templates[key] = UnitTemplate.of(
                unit, chunk_elems=self._rules.chunk_elems, streams=streams
            )
        return self._templates[key]

    def _state_place(self, unit: Unit, role: Role, side: int, zero: bool) -> StreamPlace:
        read = self._ledger.store.extent(unit.name, role, side)
        write = self._ledger.store.extent(unit.name, role, 1 - side)
        to = (write.file, write.offset)
        if self._persistent is not None and unit is self._persistent.unit:
            return StreamPlace(host_address=self._persistent.region(role).address, write=to)
        if zero and role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
            return StreamPlace(write=to)
        return StreamPlace(read=(read.file, read.offset), write=to)


def _grad_place(kept: KeptUnit) -> StreamPlace:
    name = DTYPE_NAMES[kept.dtype]
    if kept.spill is not None:
        return StreamPlace.grad(name, read=(kept.spill.file, 0))
    assert kept.region is not None
    return StreamPlace.grad(name, host_address=kept.region.address)
