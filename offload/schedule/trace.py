"""The order in which a step uses its units, as observed.

    record:  F u0 u1 u2 ... uL | B uL ... u1 u0        one list per phase (train, eval)
    ask:     after u3 in forward?  -> u4, u5, ...      what to prefetch next

Until a phase has been seen once, the order of the units in the model is the guess.  An unexpected
use costs one wait: the cursor jumps to the next place where that unit occurs, and the list of the
last whole pass stays.
"""

from __future__ import annotations


class Trace:
    """The use order of one phase.  Not thread-safe: hooks run one at a time."""

    def __init__(self, guess: list[int]) -> None:
        self._known = list(guess)  # of the last whole pass
        self._seen: list[int] = []  # of the pass in progress
        self._cursor = 0

    def begin(self) -> None:
        """Start a pass; what the previous one recorded becomes what is known."""
        if self._seen:
            self._known = self._seen
        self._seen = []
        self._cursor = 0

    def use(self, unit: int) -> bool:
        """Record that `unit` is used now; False: it is still the same use."""
        if self._seen and self._seen[-1] == unit:
            return False
        self._seen.append(unit)
        try:
            self._cursor = self._known.index(unit, self._cursor) + 1
        except ValueError:
            if unit in self._known:
                self._cursor = self._known.index(unit) + 1
        return True

    def upcoming(self, count: int) -> list[int]:
        """The next `count` units expected after the last use, first use first, each once."""
        out: list[int] = []
        for unit in self._known[self._cursor :]:
            if len(out) == count:
                break
            if unit not in out:
                out.append(unit)
        return out

    @property
    def order(self) -> list[int]:
        return list(self._seen or self._known)
