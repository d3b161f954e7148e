"""Every test of a transfer runs on every backend that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import aio

BLOCK = 4096


@pytest.fixture(params=["uring", "libaio", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    error = aio.probe().backends[request.param]
    if error is not None:
        pytest.skip(f"{request.param} does not work here: {error}")
    return request.param


@pytest.fixture
def queue(backend: str) -> Iterator[aio.Queue]:
    """Blocks of 4096 bytes, so that a few kilobytes are many blocks."""
    with aio.Queue(backend, block_bytes=BLOCK, read_depth=4, write_depth=4) as queue:
        yield queue


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file with spaces äöü.bin"
