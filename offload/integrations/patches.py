"""Attributes of other modules, replaced for a while and put back."""

from __future__ import annotations

import contextlib
from typing import Any


class Patches(contextlib.AbstractContextManager["Patches"]):
    """What was replaced; leaving it puts everything back, last first."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`; an attribute that was inherited is inherited again afterwards."""
        own, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        if own:
            self._undo.callback(setattr, owner, name, before)
        else:
            self._undo.callback(delattr, owner, name)

    def __exit__(self, *exc: object) -> None:
        self._undo.close()
