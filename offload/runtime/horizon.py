"""What comes next, as observed: the traces of all phases, and how far the engine looks.

ahead   units that are prefetched now             two, or `prefetch_elems` worth of them
stays   a unit whose next use is near             with `reuse_elems`: it is not evicted
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Sequence

from offload.schedule.trace import Trace

PREFETCH_UNITS = 2


class Phase(enum.Enum):
    """What the model is doing."""

    IDLE = "no forward or backward is running; evicted parameters refuse to be read"
    FORWARD = "forward with gradients: units leave when their module ends"
    EVAL = "forward without gradients"
    PROMPT = "generate, until its first forward ends"
    TOKEN = "one of the forwards of generate that follow"
    BACKWARD = "units leave when their gradients are complete"


FORWARDS = (Phase.FORWARD, Phase.EVAL, Phase.PROMPT, Phase.TOKEN)
_TIMED_AS = {Phase.IDLE: "outside", Phase.PROMPT: "eval", Phase.TOKEN: "eval"}


def timed_as(phase: Phase) -> str:
    """The name under which the metrics count its seconds."""
    return _TIMED_AS.get(phase, phase.name.lower())


class Horizon:
    """Traces of the phases that use units."""

    def __init__(
        self, sizes: Sequence[int], *,
        prefetch_elems: int | None = None, reuse_elems: int | None = None,
    ) -> None:  # fmt: skip
        """`sizes`: elements of each unit."""
        self._sizes = sizes
        self._prefetch_elems = prefetch_elems
        self._reuse_elems = reuse_elems
        order = list(range(len(sizes)))
        self._traces = {
            Phase.FORWARD: Trace(order),
            Phase.EVAL: Trace(order),
            Phase.PROMPT: Trace(order),
            Phase.TOKEN: Trace(order),
            Phase.BACKWARD: Trace(order[::-1]),
        }

    def __getitem__(self, phase: Phase) -> Trace:
        return self._traces[phase]

    def ahead(self, phase: Phase, away: Callable[[int], bool]) -> Iterator[int]:
        """Units to prefetch, first use first; `away(unit)`: it is not on the device."""
        if self._prefetch_elems is None:
            coming = self._traces[phase].upcoming(PREFETCH_UNITS + 1)  # one of them may be here
            yield from itertools.islice(filter(away, coming), PREFETCH_UNITS)
            return
        left = self._prefetch_elems
        for index in self._traces[phase].upcoming(len(self._sizes)):
            if left <= 0:
                return
            if away(index):
                yield index
            left -= self._sizes[index]

    def stays(self, phase: Phase, index: int) -> bool:
        """True where fewer than `reuse_elems` elements are used before the unit is used again."""
        if self._reuse_elems is None or phase is not Phase.FORWARD:
            return False
        count = len(self._sizes)
        coming = [*self._traces[phase].upcoming(count), *self._traces[Phase.BACKWARD].order]
        if index not in coming:
            return False
        between = set(coming[: coming.index(index)])
        return sum(self._sizes[each] for each in between) < self._reuse_elems
