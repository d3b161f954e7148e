"""When the gradients of a unit are complete."""

from __future__ import annotations

from offload.runtime.binding import BoundUnit


class Arrivals:
    """When are a unit's gradients complete?  When as many have arrived as in the pass before.

    Reentrant checkpointing fires a parameter's hook once per use, so in the first pass a unit whose
    modules ran more than once is complete only at the end of backward.
    """

    def __init__(self, bound: BoundUnit) -> None:
        self._trainable = sum(slot.tensor.trainable for slot in bound.unit.slots)
        self._count = 0
        self._parameters: set[int] = set()
        self._expected: int | None = None  # of the last pass

    def add(self, position: int) -> None:
        self._count += 1
        self._parameters.add(position)

    def complete(self, *, called_once: bool) -> bool:
        """True at the arrival after which nothing more is expected."""
        if self._expected is None and not called_once:
            return False
        expected = self._trainable if self._expected is None else self._expected
        return self._count == expected and (
            self._expected is not None or len(self._parameters) == self._trainable
        )

    def finish(self) -> bool:
        """End the pass; True: something may have arrived after completion, or never completed."""
        arrived = self._count > 0
        if arrived:
            self._expected = self._count
        self._count = 0
        self._parameters.clear()
        return arrived
