"""Engines on a CPU whose device has streams."""

from __future__ import annotations

import pytest
from scripted_streams import ScriptedStreams

from offload.engine import blueprint, connect
from offload.runtime.binding import BoundUnit
from offload.runtime.device import StreamDevice


@pytest.fixture
def scripted(monkeypatch):
    """Make engines whose device has scripted streams; returns the maker of the next ones."""
    made: list[ScriptedStreams] = []

    def use(seed: int, **options) -> list[ScriptedStreams]:
        def make_device(device, threads):
            made.append(ScriptedStreams(seed, **options))
            return StreamDevice(made[-1])

        def end_fill(bound, real=BoundUnit.end_fill):
            made[-1].compute()  # whoever uses the weights runs what they wait for
            real(bound)

        monkeypatch.setattr(connect, "make_device", make_device)
        monkeypatch.setattr(blueprint, "has_own_memory", lambda device: True)
        monkeypatch.setattr(BoundUnit, "end_fill", end_fill)
        return made

    return use
