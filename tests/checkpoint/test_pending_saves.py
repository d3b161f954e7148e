"""save_checkpoint right after step(): only the ticket waits for what that step still writes."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_run import CONTINUED, SAVED_AT, Reference, Run, assert_equal, running, state_of

from offload.checkpoint import folder as places
from offload.engine import ledger
from offload.engine.sealing import Sealer
from offload.errors import StoreError
from offload.optim.pipeline import UpdateJob

pytestmark = pytest.mark.timeout(120)  # what hangs fails


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While this is not set, steps seem to be writing, and do not commit; it is set at first."""
    allowed = threading.Event()
    allowed.set()
    not_finite, done = ledger._not_finite, UpdateJob.done

    def hold(pending: Any, **known: Any) -> Any:
        assert allowed.wait(60)
        return not_finite(pending, **known)

    def seem(job: UpdateJob, unit: int | None = None) -> bool:
        return (unit is not None or allowed.is_set()) and done(job, unit)

    monkeypatch.setattr(ledger, "_not_finite", hold)
    monkeypatch.setattr(UpdateJob, "done", seem)
    yield allowed
    allowed.set()


SETTINGS = [
    {}, {"overlap": "speculate"}, {"durability": "step"},
    {"durability": "none", "placement": "disk"},  # else it waits, and writes what memory holds
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s.values()) or "same")
def test_it_returns_before_the_commit_and_holds_that_step_bit_for_bit(
    reference: Reference, tmp_path: Path, commits: threading.Event, settings: dict[str, Any]
) -> None:
    with running(tmp_path / "store", **settings) as run:
        run.steps(SAVED_AT)
        commits.clear()
        saving = run.engine.save_checkpoint(tmp_path / "ck", "five")
        assert_equal(state_of(run), reference.saved)
        assert not saving.done()
        assert places.find(tmp_path / "ck", None) is None
        commits.set()
        run.steps(CONTINUED)
        saving.wait()
        assert run.losses[SAVED_AT:] == reference.losses
        assert_equal(state_of(run), reference.after)
    with running(tmp_path / "other", seed=3) as run:
        run.engine.load_checkpoint(tmp_path / "ck", "five")
        assert_equal(state_of(run), reference.saved)


def test_a_copy_waits_for_the_commit_too(
    reference: Reference, tmp_path: Path, other_drive: Path, commits: threading.Event
) -> None:
    with running(tmp_path / "store") as run:
        run.steps(SAVED_AT)
        commits.clear()
        saving = run.engine.save_checkpoint(other_drive, "five")
        assert not saving.done()
        commits.set()
        run.steps(CONTINUED)
        saving.wait()
        assert run.losses[SAVED_AT:] == reference.losses
        run.engine.load_checkpoint(other_drive, "five")
        assert_equal(state_of(run), reference.saved)


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path, commits: threading.Event) -> None:
    with running(tmp_path / "store") as run:
        run.steps(1)
        commits.clear()
        client_state = {"epochs": [1]}
        saving = run.engine.save_checkpoint(tmp_path / "ck", "x", client_state)
        saved = state_of(run)
        client_state["epochs"].append(2)
        run.epochs.left.clear()
        run.scheduler.step()
        run.engine.module.mean.add_(1.0)
        commits.set()
        saving.wait()
        run.engine.load_checkpoint(tmp_path / "ck", "x")
        assert_equal(state_of(run), saved)
        assert run.engine.load_checkpoint(tmp_path / "ck", "x")[1] == {"epochs": [1]}


NEXT_CALLS: dict[str, Callable[[Run, Path], object]] = {
    "save": lambda run, ck: run.engine.save_checkpoint(ck, "y"),
    "load": lambda run, ck: run.engine.load_checkpoint(ck, "old"),
    "close": lambda run, ck: run.engine.close(),
    "step": lambda run, ck: run.steps(2),
}


@pytest.mark.parametrize("kind", NEXT_CALLS)
def test_any_call_that_follows_at_once_lets_it_end(
    tmp_path: Path, commits: threading.Event, kind: str
) -> None:
    with running(tmp_path / "store") as run:
        run.steps(1)
        run.engine.save_checkpoint(tmp_path / "ck", "old").wait()
        run.steps(1)
        commits.clear()
        saving = run.engine.save_checkpoint(tmp_path / "ck", "x")
        timer = threading.Timer(0.1, commits.set)
        timer.start()
        NEXT_CALLS[kind](run, tmp_path / "ck")
        assert saving.wait() == tmp_path / "ck" / "x"
        timer.join()
    assert places.read_note(tmp_path / "ck" / "x").global_step == 2


def test_its_ticket_may_be_waited_for_on_another_thread_while_the_engine_is_not_called(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "store") as run:
        for _ in range(3):
            run.steps(1)
            saving = run.engine.save_checkpoint(tmp_path / "ck", "x")
            thread = threading.Thread(target=saving.wait)
            thread.start()
            thread.join()
            assert saving.done()


def test_a_step_that_is_lost_is_told_by_the_ticket_and_no_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: threading.Event
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    run = Run(tmp_path / "store")
    run.steps(2)
    run.engine.save_checkpoint(tmp_path / "ck", "good").wait()
    run.steps(1)
    with monkeypatch.context() as patch:
        patch.setattr(Sealer, "seal_update", fail)
        commits.clear()
        saving = run.engine.save_checkpoint(tmp_path / "ck", "bad")
        commits.set()
        with pytest.raises(StoreError, match=r"checkpoint 'bad' in .*: its step is lost\. gener"):
            saving.wait()
    assert sorted(os.listdir(tmp_path / "ck")) == ["good", "latest"]
    with pytest.raises(StoreError, match="input/output error"):
        run.steps(1)
    run.engine.close()
    with running(tmp_path / "store", resume=True) as run:
        assert run.engine.global_step == 2


def test_a_process_that_is_killed_before_the_commit_leaves_the_old_step_and_the_old_checkpoint(
    reference: Reference, tmp_path: Path, commits: threading.Event
) -> None:
    live, dead = tmp_path / "live", tmp_path / "dead"
    with running(live / "store") as run:
        run.steps(SAVED_AT - 1)
        run.engine.save_checkpoint(live / "ck", "same").wait()
        run.steps(1)
        commits.clear()
        saving = run.engine.save_checkpoint(live / "ck", "same")
        subprocess.run(["cp", "-a", str(live), str(dead)], check=True)  # links stay links
        commits.set()
        saving.wait()
    assert places.find(live / "ck", None).note.global_step == SAVED_AT
    assert places.find(dead / "ck", None).note.global_step == SAVED_AT - 1
    with running(dead / "store", seed=7, resume=True) as run:
        assert run.engine.global_step == SAVED_AT - 1
        run.steps(1)
        assert_equal(state_of(run), reference.saved)
        run.steps(CONTINUED)
        assert_equal(state_of(run), reference.after)
        run.engine.load_checkpoint(dead / "ck")
        assert run.engine.global_step == SAVED_AT - 1
        run.engine.save_checkpoint(dead / "ck", "next").wait()
        assert sorted(os.listdir(dead / "ck")) == ["latest", "next", "same"]
