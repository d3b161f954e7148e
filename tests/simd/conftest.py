"""Every test here starts with the variant that the process chooses itself, and restores it."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from offload import kernels


@pytest.fixture(autouse=True)
def default_variant() -> Iterator[None]:
    kernels.select(None)
    yield
    kernels.select(None)


ELSEWHERE = ("avx512", "avx2") if platform.machine() == "aarch64" else ("neon",)
HERE = [name for name in kernels.VARIANTS if name not in ELSEWHERE]


@pytest.fixture(params=HERE)
def variant(request: pytest.FixtureRequest) -> str:
    """Each variant for this architecture, selected; skipped where the processor lacks it."""
    name = str(request.param)
    if name not in kernels.supported():
        pytest.skip(f"{name} does not run on this processor")
    kernels.select(name)
    return name
