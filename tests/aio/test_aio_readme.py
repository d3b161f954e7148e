"""The example in aio/README.md is a program that works."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "aio" / "README.md"


@pytest.mark.parametrize("size", [1, 10_000, 65_536, 300_001])
def test_the_example_copies_a_file(tmp_path: Path, size: int) -> None:
    code = README.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    data = random.Random(size).randbytes(size)
    (tmp_path / "a").write_bytes(data)
    names["copy"](str(tmp_path / "a"), str(tmp_path / "b"), piece=8192)  # type: ignore[operator]
    assert (tmp_path / "b").read_bytes() == data
