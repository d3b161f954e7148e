"""One optimizer step: decide, submit, hand over.

finish the previous generation (its commit must be there before the first write)
norm and finiteness of this step's gradients  -> skip (and the fp16 scale), or the clip factor
rows of hyper-parameters                      -> one per group and step count
updates made during backward                  -> kept where all this is as they assumed
every other unit that got a gradient          -> the update pipeline, in order of next use
the engine refreshes the small tensors; the others are waited for when they are fetched
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.engine.interrupts import uninterrupted
from offload.engine.ledger import Ledger, Made, Pending
from offload.engine.speculate import Speculator
from offload.engine.updates import Rows, UpdateBuilder
from offload.metrics import Metrics
from offload.optim.loss_scale import LossScale
from offload.optim.rules import Progress
from offload.partition.unit import Unit
from offload.runtime.lent import LentGradients


@dataclass(frozen=True)
class Outcome:
    """What a step decided."""

    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class Groups:
    """The optimizer's groups: hyper-parameters as they are now, and the parameters of each."""

    settings: Callable[[], Sequence[Mapping[str, Any]]]
    names_of: Callable[[Mapping[str, Any]], list[str]]

    def with_names(self, wanted: set[str]) -> list[tuple[Mapping[str, Any], list[str]]]:
        """Each group with those of its parameters that are in `wanted`."""
        return [
            (group, [name for name in self.names_of(group) if name in wanted])
            for group in self.settings()
        ]


class Stepper:
    """Turns kept gradients into a submitted generation."""

    def __init__(
        self, units: Sequence[Unit], persistent: Unit | None, *,
        names: Sequence[str], max_norm: float, groups: Groups, ledger: Ledger,
        lent: LentGradients, builder: UpdateBuilder, counts: Progress, scale: LossScale,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        """`names`: named_parameters() order, that of the norm.  `max_norm`: 0 for no clipping."""
        self._units = [*units, *([persistent] if persistent else [])]
        self._persistent = persistent
        self._names = names
        self.max_norm = max_norm  # of the coming step
        self._groups = groups
        self._ledger = ledger
        self._lent = lent
        self._builder = builder
        self._counts = counts
        self._scale = scale
        self._metrics = metrics
        self._norm_index = {
            slot.tensor.name: lent.keeper[unit.index].index_of[slot.tensor.name]
            for unit in self._units
            for slot in unit.slots
        }

    def assume(self) -> Rows:
        """The rows of the next step if nothing is clipped and every parameter gets a gradient."""
        slots = (slot for unit in self._units for slot in unit.slots)
        names = {slot.tensor.name for slot in slots if slot.tensor.trainable}
        return self._rows(names, 1.0 / self._scale.value)

    def step(
        self, speculator: Speculator, *, order: Sequence[int],
        capture: Callable[[], dict[str, Any]], submitted: Callable[[Collection[int]], None],
    ) -> Outcome:  # fmt: skip
        """Update what got a gradient; returns before the disk is done.

        `order`: units by next use.  `capture()`: the engine's state for the commit.
        `submitted(units)`: their weights are the next generation's from now on; no signal comes
        between it and the submission.
        """
        self._ledger.finish()
        self._lent.take_all_back()
        self._lent.keeper.settle()
        with_grad = self._with_grad()
        if with_grad:
            self._scale.check_applied()
        norm, finite = self._norm(with_grad)
        if not finite or not with_grad:
            speculator.settle(None, clipped=False)
            self._clear()
            self._metrics.skipped_steps += not finite
            if not finite:
                self._scale.update(overflow=True)
            return Outcome(norm, not finite)
        factor = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0
        rows = self._rows(with_grad, factor / self._scale.value)
        speculator.settle(rows, clipped=factor != 1.0)
        with uninterrupted():
            made = self._submit(rows, speculator, order, capture)
            self._clear()
            submitted(made)
        return Outcome(norm, False)

    def kept_norm(self) -> float:
        """The norm that step() would find now; waits for gradients on their way to disk."""
        self._lent.take_all_back(stays=True)
        self._lent.keeper.settle()
        return self._norm(self._with_grad())[0]

    def _with_grad(self) -> set[str]:
        return set().union(*(self._lent.keeper[unit.index].has_grad for unit in self._units))

    def _clear(self) -> None:
        self._lent.end_step()
        self._scale.forget()

    def _rows(self, names: set[str], factor: float) -> Rows:
        return Rows(*self._counts.next_rows(self._groups.with_names(names), grad_scale=factor))

    def _norm(self, with_grad: set[str]) -> tuple[float, bool]:
        """Global norm, unscaled, in named_parameters() order; whether all gradients are finite."""
        table = self._lent.keeper.norm
        indices = [self._norm_index[name] for name in self._names if name in with_grad]
        norm = math.sqrt(sum(table.value(index) for index in indices))
        return norm / self._scale.value, not any(table.nonfinite(index) for index in indices)

    def _submit(
        self, rows: Rows, speculator: Speculator, order: Sequence[int],
        capture: Callable[[], dict[str, Any]],
    ) -> Collection[int]:  # fmt: skip
        """Give the pipeline what was not made ahead, and the ledger everything; tell the units."""
        if not rows.row_of:
            self._scale.update(overflow=False)
            return ()
        position = {unit: place for place, unit in enumerate(order)}
        if self._persistent is not None:
            position[self._persistent.index] = -1  # waited for at once

        def urgency(unit: Unit) -> int:
            return position.get(unit.index, len(position))

        updated = [
            unit
            for unit in self._units
            if any(slot.tensor.name in rows.row_of for slot in unit.slots if slot.tensor.trainable)
        ]
        made: dict[int, Made] = {}
        held = [unit for unit in updated if unit.index not in speculator.standing]
        if held:
            held.sort(key=urgency)
            job = self._builder.submit(held, rows, urgency=urgency, released=True)
            made = {unit.index: Made(job, number) for number, unit in enumerate(held)}
        self._scale.update(overflow=False)  # before the state is captured
        self._counts.advance(rows.row_of)
        sides = {unit.name: self._ledger.next_side(unit.index) for unit in updated}
        state = capture()
        made.update(speculator.keep())
        self._ledger.submit(Pending(made, sides, self._ledger.generation + 1, state))
        return made
