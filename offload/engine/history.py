"""What updating ahead of step() has cost, and whether it pays (`overlap="auto"`).

    a step          its share of clipped or redone elements; its seconds, by how it went:
                    kept, redone, or held
    pays            rate x redone + (1 - rate) x kept  <  held          rate: of recent steps

Until all three have been seen, a rate decides at which redoing is taken to cost more than holding.
While one way is used the other is tried anew now and then, so that neither figure grows old.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from statistics import median

RECENT_STEPS = 16
MOST_REDONE = 0.25  # of recent steps, where the costs are not known
LEAST_TIMED = 3  # steps of a kind before its median counts
RETRY_STEPS = 64  # the way that was not chosen is tried this often


class Kind(enum.Enum):
    """How a step went."""

    KEPT = "its updates ran during backward and held"
    REDONE = "some of them ran again at step()"
    HELD = "its updates waited for the norm"


class History:
    """Notes of recent steps; the engine's thread alone."""

    def __init__(self) -> None:
        self.kept_elems = 0
        self.redone_elems = 0
        self.undone: Counter[str] = Counter()  # by unit: dropped where only a copy was changed
        self.voided = 0  # elements of this step's that later or edited gradients have made void
        self._shares: deque[float] = deque(maxlen=RECENT_STEPS)
        self._seconds: defaultdict[Kind, deque[float]] = defaultdict(
            lambda: deque(maxlen=RECENT_STEPS)
        )
        self._last: Kind | None = None  # of the step whose seconds come next
        self._same = 0  # decisions in a row
        self._ahead = True

    def add(self, staked: int, lost: int, *, clipped: bool) -> None:
        """Note a step; one that was held and clipped is one that would have been redone."""
        self._shares.append(lost / staked if staked else float(clipped))
        self._last = (Kind.REDONE if lost else Kind.KEPT) if staked else Kind.HELD
        self.kept_elems += staked - lost
        self.redone_elems += lost

    def take_voided(self) -> int:
        """End a step's count."""
        voided, self.voided = self.voided, 0
        return voided

    def took(self, seconds: float) -> None:
        """Note the wall time of the step that was added last."""
        if self._last is not None and seconds > 0:
            self._seconds[self._last].append(seconds)
        self._last = None

    def pays(self) -> bool:
        """Decide for the coming step: update ahead of it?"""
        ahead = self._is_cheaper()
        self._same = self._same + 1 if ahead is self._ahead else 0
        self._ahead = ahead
        retry = self._same % RETRY_STEPS == RETRY_STEPS - 1 and len(self._shares) == RECENT_STEPS
        return not ahead if retry and 0 < self._rate() < 1 else ahead

    def _rate(self) -> float:
        return sum(self._shares) / RECENT_STEPS

    def _is_cheaper(self) -> bool:
        times = [self._seconds[kind] for kind in (Kind.KEPT, Kind.REDONE, Kind.HELD)]
        if any(len(seconds) < LEAST_TIMED for seconds in times):
            return self._rate() <= MOST_REDONE
        kept, redone, held = (median(seconds) for seconds in times)
        rate = self._rate()
        return rate * redone + (1 - rate) * kept < held
