"""One uninterrupted run that every checkpoint test compares with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoint_run import running, state_of

SAVED_AT = 5
CONTINUED = 4


@dataclass(frozen=True)
class Reference:
    """A checkpoint saved after step 5, and the four steps after it."""

    checkpoints: Path
    saved: dict[str, Any]
    losses: list[float]
    after: dict[str, Any]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, first_run: None) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    with running(root / "store") as run:
        run.steps(SAVED_AT)
        saving = run.engine.save_checkpoint(root / "checkpoints", "five", {"note": "hello"})
        saved = state_of(run)
        run.steps(CONTINUED)
        saving.wait()
        return Reference(root / "checkpoints", saved, run.losses[SAVED_AT:], state_of(run))


@pytest.fixture
def other_drive() -> Any:
    """A folder on another file system, where files cannot be linked."""
    import shutil
    import tempfile

    if not Path("/dev/shm").is_dir():
        pytest.skip("needs a second file system")
    folder = Path(tempfile.mkdtemp(prefix="offload-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
