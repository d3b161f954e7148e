"""The bench that the store's tests work at."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench([tmp_path])


@pytest.fixture
def two_paths(tmp_path: Path) -> Bench:
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    return Bench(paths)
