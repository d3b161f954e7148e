"""Streams that run their work late and in any order that their events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from offload.runtime.streams import Lane


class ScriptedEvent:
    """Passed when its stream has come to it; `at`: where it stands in the log."""

    def __init__(self, streams: ScriptedStreams, lane: Lane) -> None:
        self.lane = lane
        self.at = len(streams.log)
        self.passed = False
        self._streams = streams

    def done(self) -> bool:
        self._streams.tick()
        return self.passed

    def wait(self) -> None:
        self._streams.run_until(self)


class ScriptedStreams:
    """What is given to a lane waits there; `tick` runs some of it.  Forgets nothing, drops nothing.

    COMPUTE's work is the caller's own and runs at once, as torch on a CPU does, so a wait of
    COMPUTE runs what it waits for: at once, or with `lazy` when somebody is about to compute.
    """

    def __init__(
        self, seed: int, *, ignore_waits_of: Lane | None = None, lazy: bool = False
    ) -> None:
        self._random = random.Random(seed)
        self._ignore = ignore_waits_of  # a mistake that a test must find
        self._work: dict[Lane, deque[Callable[[], bool]]] = {lane: deque() for lane in Lane}
        self._lazy = lazy
        self._owed: list[ScriptedEvent] = []  # what compute waits for
        self.log: list[str] = []
        self.copies: list[tuple[int, int]] = []  # in: where given, behind which point of compute
        self._behind = 0
        self.registered: list[int] = []
        self.most_waiting = 0

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        self.log.append(f"run {lane.value}")
        if lane is Lane.IN:
            self.copies.append((len(self.log) - 1, self._behind))

        def step() -> bool:
            with torch.no_grad():
                work()
            return True

        self._give(lane, step)

    def record(self, lane: Lane) -> ScriptedEvent:
        event = ScriptedEvent(self, lane)
        self.log.append(f"record {lane.value}")

        def step() -> bool:
            event.passed = True
            return True

        self._give(lane, step)
        return event

    def wait(self, lane: Lane, event: ScriptedEvent) -> None:
        self.log.append(f"wait {lane.value} for {event.lane.value}")
        if lane is Lane.IN and event.lane is Lane.COMPUTE:
            self._behind = max(self._behind, event.at)
        if lane is self._ignore:
            return
        if lane is Lane.COMPUTE:
            self._owed.append(event)
            if not self._lazy:
                self.compute()
        else:
            self._give(lane, lambda: event.passed)

    def register(self, address: int, num_bytes: int) -> Callable[[], None]:
        self.registered.append(num_bytes)
        return lambda: self.registered.remove(num_bytes)

    def compute(self) -> None:
        """Compute goes on: first what it waits for."""
        while self._owed:
            self.run_until(self._owed.pop(0))

    def tick(self) -> None:
        """Let one lane do what is next there, if its events allow."""
        lane = self._random.choice([Lane.IN, Lane.OUT])
        queue = self._work[lane]
        if queue and queue[0]():
            queue.popleft()

    def run_until(self, event: ScriptedEvent) -> None:
        for _ in range(100_000):
            if event.passed:
                return
            self.tick()
        raise AssertionError(f"a wait for {event.lane.value} never ends: {self.log[-20:]}")

    def _give(self, lane: Lane, step: Callable[[], bool]) -> None:
        if lane is Lane.COMPUTE:
            step()
            return
        self._work[lane].append(step)
        self.most_waiting = max(self.most_waiting, len(self._work[lane]))
