"""The bench that the store's tests work at."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_bench import Bench

from offload.store import durable


@pytest.fixture(autouse=True)
def no_waiting_for_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes take most of the time and change nothing that these tests can see."""
    monkeypatch.setattr(durable, "flush", lambda fd: None)
    monkeypatch.setattr(durable, "flush_folder", lambda folder: None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench([tmp_path])


@pytest.fixture
def two_paths(tmp_path: Path) -> Bench:
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    return Bench(paths)
