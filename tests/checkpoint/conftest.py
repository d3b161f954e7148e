"""One uninterrupted run that every checkpoint test compares with; a second file system."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_run import CONTINUED, SAVED_AT, Reference, running, state_of


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
def other_drive() -> Iterator[Path]:
    """A folder on another file system, where files cannot be linked."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs a second file system")
    folder = Path(tempfile.mkdtemp(prefix="offload-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
