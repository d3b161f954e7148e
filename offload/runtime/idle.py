"""Kept gradients of parameters that are on the device while neither forward nor backward runs.

forward or backward ends   show()   plain parameters answer for what is kept
the next one begins        hide()   they are plain again, as torch and its compiler want them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from offload.runtime.binding import BoundUnit
from offload.runtime.evicted import Guard, idle_class
from offload.runtime.horizon import Phase


class IdleGradients:
    """Puts present parameters into the idle class, and takes them out again."""

    def __init__(
        self, guard: Guard, wanted: Callable[[], bool],
        present: Callable[[], Iterable[BoundUnit]],
    ) -> None:  # fmt: skip
        self._class = idle_class(guard)
        self._wanted = wanted  # there is something to answer, or assigning must be seen
        self._present = present
        self._shown: list[nn.Parameter] = []

    def follow(self, phase: Phase) -> None:
        """Show while nothing runs."""
        if phase is Phase.IDLE:
            self.show()
        else:
            self.hide()

    def show(self) -> None:
        """Let `p.grad` be what is kept, where that is wanted and parameters are present."""
        if not self._wanted():
            return
        for bound in self._present():
            for parameter in bound.parameters:
                if type(parameter) is nn.Parameter and parameter.requires_grad:
                    parameter.__class__ = self._class
                    self._shown.append(parameter)

    def hide(self) -> None:
        """Make them plain again; may be called at any time."""
        while self._shown:
            parameter = self._shown.pop()
            if type(parameter) is self._class:  # else it was evicted, perhaps fetched again
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
