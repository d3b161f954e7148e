"""Room for units' weights on the device, and the storage of the next one, made ahead.

    compute   | t ........ | u ........ | v ........
    storage of v is made   ^ in front of u: what used that memory before was t, or came before it
    copy into it               ======     waits for t, and runs beside u

A storage is made by compute's own allocator, so whoever had its memory before was given to compute
before it was made: a copy that waits for that point, and for nothing given later, is safe.  What is
made ahead counts as much as what is present; it is given up where another unit is needed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from offload.errors import BudgetError
from offload.runtime.binding import BoundUnit
from offload.runtime.device import Device


class DeviceRoom:
    """What the device budget leaves for weights of units that come and go.  Units go by index."""

    def __init__(
        self, bound: Sequence[BoundUnit], device: Device, *, weight_bytes: int
    ) -> None:  # fmt: skip
        self.mark = device.mark
        self._ahead = device.beside_compute
        self._bound = bound
        self._capacity = weight_bytes
        self._reserved: BoundUnit | None = None

    def reserve(self, coming: Iterable[int], present: Sequence[int]) -> None:
        """Make the storage of the first unit of `coming` that will leave again, if it fits beside
        `present`; what was made for another is given up.
        """
        if not self._ahead:
            return
        unit = next((each for each in map(self._bound.__getitem__, coming) if not each.stays), None)
        if unit is None or unit is self._reserved:
            return
        self.give_up()
        if self._size(present) + unit.weight_bytes <= self._capacity:
            unit.reserve(self.mark)
            self._reserved = unit

    def give_up(self) -> None:
        """Free what was made ahead and is not filled yet."""
        unit, self._reserved = self._reserved, None
        if unit is not None:
            unit.give_up()

    def make(
        self, index: int, present: Sequence[int], *, uses: Sequence[int],
        evict: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Evict units without `uses`, in the order of `present`, until the unit fits.

        Raises BudgetError where it does not.  Units that stay have room of their own.
        """
        bound = self._bound[index]
        if bound.stays:
            return
        if self._reserved is not bound:
            self.give_up()
        self._reserved = None
        others = [each for each in present if not self._bound[each].stays]
        taken = self._size(others)
        for each in others:
            if taken + bound.weight_bytes <= self._capacity:
                return
            if not uses[each] and not self._bound[each].holds:
                taken -= self._bound[each].weight_bytes
                evict(each)
        if taken + bound.weight_bytes > self._capacity:
            names = ", ".join(self._bound[each].unit.name for each in others if uses[each])
            raise BudgetError(
                f"device_memory is too small for unit {bound.unit.name!r}: expected"
                f" {taken + bound.weight_bytes:,} bytes for weights, of which {taken:,} are"
                f" in use by {names}, got {self._capacity:,}. Raise device_memory."
            )

    def _size(self, units: Iterable[int]) -> int:
        found = (self._bound[index] for index in units)
        return sum(each.weight_bytes for each in found if not each.stays)
