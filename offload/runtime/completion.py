"""When the gradients of a unit are complete.

Usually when each parameter has got one.  Reentrant checkpointing fires a parameter's hook once per
use, so for a unit whose modules ran more than once the count is learned: a pass with a number of
calls that was never seen before is complete only at the end of backward.
"""

from __future__ import annotations

from offload.runtime.binding import BoundUnit


class Arrivals:
    """Counts the gradients of one unit in one backward pass."""

    def __init__(self, bound: BoundUnit) -> None:
        trainable = sum(slot.tensor.trainable for slot in bound.unit.slots)
        self._expected = {1: trainable}  # arrivals of a pass by calls of the unit's modules
        self.calls = 0  # of the unit's modules in the last forward
        self._count = 0
        self._parameters: set[int] = set()

    def add(self, position: int) -> bool:
        """Count an arrival; True: nothing more is expected."""
        self._count += 1
        self._parameters.add(position)
        expected = self._expected.get(max(self.calls, 1))
        return self._count == expected and len(self._parameters) == self._expected[1]

    def finish(self) -> bool:
        """End the pass; True: something may have arrived after completion, or never completed."""
        arrived = self._count > 0
        if arrived and self.calls > 1 and len(self._parameters) == self._expected[1]:
            self._expected[self.calls] = self._count
        self._count = 0
        self._parameters.clear()
        return arrived
