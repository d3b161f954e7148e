"""Which units are on the device, and why they may leave.

    use(u)      count + 1, present          a module's forward begins
    release(u)  count - 1                   it ends; unused units leave at once in forward
    ensure(u)   present, no count           a saved view is unpacked, a parameter used elsewhere
    evict(u)    storage freed

Room is made before a fill: units that nobody uses leave, least recently used first.  Phases decide
what the next uses are; the bytes on the device never exceed what the budget leaves for weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from offload.metrics import Metrics
from offload.runtime.binding import BoundUnit, Presence
from offload.runtime.evicted import EvictedParameter
from offload.runtime.fetch import Fetcher
from offload.runtime.horizon import FORWARDS, Horizon, Phase, timed_as
from offload.runtime.loans import Loans
from offload.runtime.room import DeviceRoom


class Residency:
    """Presence of all units.  Hooks call it one at a time; it waits only inside fills."""

    def __init__(
        self, bound: Sequence[BoundUnit], fetcher: Fetcher, guard: type[EvictedParameter], *,
        horizon: Horizon, room: DeviceRoom, metrics: Metrics,
    ) -> None:  # fmt: skip
        self.bound = bound
        self.by_layers: bool | None = None  # the last forward for training; None: there was none
        self.phase = Phase.IDLE
        self.before_phase: Callable[[Phase], None] = lambda phase: None  # nothing has moved yet
        self._fetcher = fetcher
        self._guard = guard
        self._room = room
        self._metrics = metrics
        self.present: dict[int, BoundUnit] = {}  # by the identity of their storage
        self._uses = [0] * len(bound)
        self._recent: list[int] = []  # present units, least recently used first
        self._horizon = horizon

    @property
    def loans(self) -> Loans:
        return self._fetcher.loans

    def begin(self, phase: Phase) -> None:
        """Enter a phase."""
        self.phase = phase
        self.before_phase(phase)
        self._metrics.enter(timed_as(phase))
        if phase is not Phase.IDLE:
            self._horizon[phase].begin()
            self._fetcher.phase = "backward" if phase is Phase.BACKWARD else "forward"
            self.look_ahead(phase)

    def use(self, index: int) -> None:
        """Make a unit present and keep it until the matching `release`."""
        self.ensure(index, again=True)
        self._uses[index] += 1

    def release(self, index: int) -> None:
        """End a use; in forward an unused unit leaves, unless it is next, or the turn-around."""
        self._uses[index] -= 1
        if self.phase in FORWARDS and not self._uses[index]:
            trace = self._horizon[self.phase]
            last = trace.order[-1:] == [index]
            turning = last and self.phase is Phase.FORWARD and not trace.upcoming(1)
            if not turning and trace.leave(index) and not self._horizon.stays(self.phase, index):
                self.evict(index)

    def ensure(self, index: int, *, again: bool = False) -> None:
        """Make a unit present; `again`: for another use, even if it was used last."""
        bound, moved = self.bound[index], False
        if self.phase is not Phase.IDLE:
            trace = self._horizon[self.phase]
            passed = trace.passed(index)
            if passed is not None and not self._uses[passed]:
                self.evict(passed)
            moved = trace.use(index, again=again or bound.presence is Presence.EVICTED)
        if bound.presence is Presence.PRESENT:
            self._recent.remove(index)
            self._recent.append(index)
        else:
            self._fill(bound)
        if moved:
            self._metrics.reach(bound.unit.name)
            self.look_ahead(self.phase)

    def _fill(self, bound: BoundUnit) -> None:
        self._room.make(
            bound.unit.index, self._recent, uses=self._uses, evict=partial(self.evict, ahead=False)
        )
        bound.begin_fill(self._room.mark)
        try:
            if not bound.fresh:
                self._fetcher.fill(bound)
        except BaseException:
            bound.evict(self._guard, self._room.mark)
            raise
        bound.end_fill()
        self.present[bound.storage_id] = bound
        self._recent.append(bound.unit.index)

    def evict(self, index: int, *, ahead: bool = True) -> None:
        """Free a unit's storage, if nobody holds it; one that stays on the device is put aside.

        `ahead`: its room may be taken for what is used next.
        """
        bound = self.bound[index]
        if bound.presence is Presence.EVICTED or bound.holds:
            return
        self.present.pop(bound.storage_id, None)
        bound.evict(self._guard, self._room.mark)
        self.loans.drop(index)
        self._metrics.evictions[bound.unit.name] += not bound.stays
        if index in self._recent:
            self._recent.remove(index)
        if ahead and self.phase is not Phase.IDLE:
            self._room.reserve(self._away(self.phase), self._recent)

    def evict_unused(self, *, but: Collection[int] = ()) -> None:
        """Evict all units that no module is using now, and give up what was made ahead."""
        for index in list(self._recent):
            if not self._uses[index] and index not in but:
                self.evict(index)
        self._room.give_up()

    def forget_uses(self) -> None:
        """After an exception left modules half-way: nobody uses anything."""
        self._uses = [0] * len(self._uses)

    def discard_prefetches(self) -> None:
        """Weights are about to change on disk."""
        self._fetcher.discard()

    def look_ahead(self, phase: Phase) -> None:
        """Prefetch what `phase` uses next."""
        self._fetcher.prefetch([self.bound[index].unit for index in self._away(phase)])
        self._room.reserve(self._away(phase), self._recent)

    def _away(self, phase: Phase) -> Iterator[int]:
        return self._horizon.ahead(phase, lambda index: self.bound[index].is_away)

    def kept_for_backward(self) -> set[int]:
        """The unit with which forward ends and backward begins, and those used again soon."""
        order = self._horizon[Phase.FORWARD].order
        return {
            index
            for index in order
            if index == order[-1] or self._horizon.stays(Phase.FORWARD, index)
        }

    def order(self, phase: Phase = Phase.FORWARD) -> list[int]:
        """Units by their next use in training."""
        return self._horizon[phase].order
