"""The order in which a step uses its units, as observed.

    record:  F u0 u1 u2 ... uL | B uL ... u1 u0        one list per phase (train, eval, generate)
    ask:     after u3 in forward?  -> u4, u5, ...      what to prefetch next

Until a phase has been seen once, the order of the units in the model is the guess.  An unexpected
use costs one wait: the cursor jumps to the next place where that unit occurs, and the list of the
last whole pass stays.  A unit that is used again at once stands there twice: so it is known that it
need not leave.
"""

from __future__ import annotations

import itertools


class Trace:
    """The use order of one phase.  Not thread-safe: hooks run one at a time."""

    def __init__(self, guess: list[int]) -> None:
        self._known = list(guess)  # of the last whole pass
        self._seen: list[int] = []  # of the pass in progress
        self._cursor = 0
        self._waits: int | None = None  # stayed for its next use

    def begin(self) -> None:
        """Start a pass; what the previous one recorded becomes what is known."""
        if self._seen:
            self._known = self._seen
        self._seen = []
        self._cursor = 0
        self._waits = None

    def use(self, unit: int, *, again: bool = False) -> bool:
        """Record that `unit` is used now; False: it is still the same use, unless `again`."""
        again |= self._waits == unit
        self._waits = None
        if self._seen and self._seen[-1] == unit and not again:
            return False
        repeated = self._seen[-1:] == [unit] != self._known[self._cursor : self._cursor + 1]
        self._seen.append(unit)
        if repeated:  # once more than known: what comes is the same
            return True
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

    def leave(self, unit: int) -> bool:
        """Nobody uses `unit` any more; False: it is next again, so it had better stay."""
        stays = self._seen[-1:] == [unit] == self._known[self._cursor : self._cursor + 1]
        self._waits = unit if stays else None
        return not stays

    def passed(self, unit: int) -> int | None:
        """Who stayed for a use that seems not to have come, where `unit` comes instead."""
        waits = self._waits
        if waits is None or waits == unit:
            return None
        # A present weight may have been read, which nobody sees; else the next pass would forget.
        self.use(waits, again=True)
        return waits

    @property
    def order(self) -> list[int]:
        """Units in the order of their uses; those in a row are one."""
        return [unit for unit, _ in itertools.groupby(self._seen or self._known)]
