"""Threads that run one at a time, in turn: each keeps the baton until it passes it on.

    0 .. pass -> 1 .. pass -> ... -> k-1 .. pass -> 0 ..        those that have ended are left out

Torch's random numbers travel with the baton: each thread has a stream of its own.  Autograd's
sequence numbers do not: backward runs the node with the greatest first, whatever its thread, so
where all have come to the same place they go on from the same number.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from offload.runtime import random_state


class Stopped(Exception):
    """Another thread has failed: unwind."""


class Baton:
    """For threads 0 to `count` - 1; thread 0 has it first."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._changed = threading.Condition()
        self._alive = list(range(len(seeds)))
        self._turn = 0
        self._stopped = False
        self._states = [random_state.seeded(seed) for seed in seeds]
        self._counts = [0] * len(seeds)  # sequence numbers where each passed it on
        self._start = 0  # the greatest of them

    @property
    def leader(self) -> int:
        """The first thread that has not ended: where it is, all others have been."""
        return self._alive[0]

    def take(self, index: int) -> None:
        """Wait for the turn of thread `index`; raises Stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == index or self._stopped)
            if self._stopped:
                raise Stopped
        random_state.restore(self._states[index])

    def pass_on(self, index: int) -> None:
        """Let the next one run, and come back when it is this thread's turn again."""
        self._states[index] = random_state.capture()
        self._counts[index] = torch._C._autograd._get_sequence_nr()
        with self._changed:
            self._give_to(self._alive[(self._alive.index(index) + 1) % len(self._alive)])
        self.take(index)
        if index == self.leader:  # the others are here too, and wait
            self._start = max(self._counts)
        _count_on(self._start)

    def leave(self, index: int) -> None:
        """End thread `index`'s part."""
        with self._changed:
            position = self._alive.index(index)
            self._alive.remove(index)
            if self._alive:
                self._give_to(self._alive[position % len(self._alive)])

    def stop(self) -> None:
        """Make every other thread unwind."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _give_to(self, index: int) -> None:
        self._turn = index
        self._changed.notify_all()


def _count_on(start: int) -> None:
    """Bring this thread's sequence number up to `start`, with nodes that nobody keeps."""
    with torch.enable_grad():
        empty = torch.empty(0, device="cpu", requires_grad=True)
        while torch._C._autograd._get_sequence_nr() < start:
            empty.view_as(empty)


def draw_seeds(count: int) -> list[int]:
    """Seeds of the micro-batches' random numbers, from torch's own generator."""
    return [int(seed) for seed in torch.randint(2**62, (count,))]
