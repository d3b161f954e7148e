"""A save that is killed, or meets a full disk, leaves the old checkpoint or the new one."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_run import Run, assert_equal, running, state_of

from offload.checkpoint import folder as places
from offload.checkpoint import save
from offload.errors import StateError, StoreError
from offload.store import durable


@pytest.fixture
def moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Copies of the directory of checkpoints, taken before each write or change of a name:

    what a process that dies at that moment would leave.
    """
    taken: list[Path] = []
    number = itertools.count()
    directory = tmp_path / "ck"

    def watch(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*args: object, **options: object) -> object:
            if directory.exists() and str(tmp_path / "moment-") not in str(args):
                taken.append(tmp_path / f"moment-{next(number)}")
                shutil.copytree(directory, taken[-1])
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (os, "link"), (os, "rename"), (os, "replace"), (durable, "flush"), (durable, "write_at"),
    ):  # fmt: skip
        watch(module, name)
    return taken


def test_a_process_that_dies_at_any_moment_of_a_save_leaves_the_old_or_the_new_one(
    tmp_path: Path, moments: list[Path]
) -> None:
    with running(tmp_path / "store") as run:
        run.steps(1)
        run.engine.save_checkpoint(tmp_path / "ck", "same").wait()
        run.steps(1)
        del moments[:]
        run.engine.save_checkpoint(tmp_path / "ck", "same", keep=1).wait()
        taken = list(moments)
        assert len(taken) > 20
        seen = []
        for moment in taken:
            found = places.find(moment, None)
            assert found is not None, os.listdir(moment)
            seen.append(found.note.global_step)
        assert set(seen) == {1, 2}
        assert seen == sorted(seen)
        # What is left half done is finished or undone by the next save there.
        for moment in (taken[len(taken) // 2], taken[-1]):
            run.engine.save_checkpoint(moment, "next").wait()
            assert sorted(os.listdir(moment)) == ["latest", "next", "same"]
            run.engine.load_checkpoint(moment, "same")


def test_every_moment_loads_to_the_state_that_its_note_tells(
    tmp_path: Path, moments: list[Path]
) -> None:
    with running(tmp_path / "store") as run:
        states = {}
        for step in (1, 2):
            run.steps(1)
            states[step] = state_of(run)
            del moments[:]
            run.engine.save_checkpoint(tmp_path / "ck", "same").wait()
        taken = moments[:: max(1, len(moments) // 6)] + moments[-1:]
        loaded = set()
        for moment in list(taken):
            run.engine.load_checkpoint(moment, "same")
            assert_equal(state_of(run), states[run.engine.global_step])
            loaded.add(run.engine.global_step)
        assert loaded == {1, 2}


def test_an_error_in_the_background_is_told_by_the_ticket_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(plan: object, record: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    with running(tmp_path / "store") as run:
        run.steps(1)
        run.engine.save_checkpoint(tmp_path / "ck", "good").wait()
        with monkeypatch.context() as patch:
            patch.setattr(save, "_write_record", fail)
            saving = run.engine.save_checkpoint(tmp_path / "ck", "bad")
            with pytest.raises(StoreError, match=r"checkpoint 'bad' .*Check the drive"):
                saving.wait()
        assert saving.done()
        assert "checkpoint 'bad' is not saved" in caplog.text
        assert sorted(os.listdir(tmp_path / "ck")) == ["good", "latest"]
        run.steps(1)
        run.engine.save_checkpoint(tmp_path / "ck", "bad").wait()
        assert places.read_latest(tmp_path / "ck") == "bad"


def test_two_processes_that_save_one_tag_do_not_mix(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        (tmp_path / "ck").mkdir()
        lock = places.make_saving_folder(tmp_path / "ck", "x")
        with pytest.raises(StoreError, match="in use"):
            run.engine.save_checkpoint(tmp_path / "ck", "x")
        lock.release()
        run.engine.save_checkpoint(tmp_path / "ck", "x").wait()
        assert sorted(os.listdir(tmp_path / "ck")) == ["latest", "x"]


@contextlib.contextmanager
def volume(path: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of its own that is this large."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
    if os.getuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs root and mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path, leave: int) -> Path:
    """Take all space but `leave` bytes."""
    stat = os.statvfs(path)
    ballast = path / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - leave)
    return ballast


@pytest.mark.root
def test_a_disk_that_is_full_for_the_followers_refuses_the_save_and_training_goes_on(
    tmp_path: Path,
) -> None:
    with volume(tmp_path / "small", 24 << 20) as small:
        with running(small / "store") as run:
            run.steps(2)
            ballast = fill(small, 300_000)
            before = sorted(os.listdir(run.store_folder))
            with pytest.raises(StoreError, match=r"expected .* free for what .* got .*Training"):
                run.engine.save_checkpoint(small / "ck", "x")
            assert sorted(os.listdir(run.store_folder)) == before
            assert os.listdir(small / "ck") == []
            run.steps(2)
            ballast.unlink()
            run.engine.save_checkpoint(small / "ck", "x").wait()
            fill(small, 100_000)  # what follows the saved files is reserved: steps need no space
            run.steps(3)
            state = state_of(run)
        with running(small / "store", seed=5, resume=True) as again:
            # the random numbers are those of the last step, not of the readings after it
            assert_equal(state_of(again), state)


@pytest.mark.root
def test_a_full_target_refuses_the_save_and_the_checkpoint_before_it_stays(
    tmp_path: Path,
) -> None:
    with volume(tmp_path / "small", 24 << 20) as small, running(tmp_path / "store") as run:
        run.steps(1)
        run.engine.save_checkpoint(small, "x").wait()
        saved = state_of(run)
        run.steps(1)
        fill(small, 300_000)
        with pytest.raises(StoreError, match=r"expected .* free for its files, got .*Training"):
            run.engine.save_checkpoint(small, "x")
        assert sorted(os.listdir(small)) == ["ballast", "latest", "x"]
        assert not list(run.store_folder.glob("pin-*"))
        run.steps(1)
        run.engine.load_checkpoint(small)
        assert_equal(state_of(run), saved)


@pytest.mark.root
def test_a_store_drive_without_space_for_followers_copies_before_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with volume(tmp_path / "small", 24 << 20) as small, running(small / "store") as run:
        run.steps(2)
        saved = state_of(run)
        fill(small, 300_000)
        saving = run.engine.save_checkpoint(tmp_path / "ck", "x")
        assert saving.done()
        assert "too little space to go on meanwhile" in caplog.text
        run.steps(2)
        run.engine.load_checkpoint(tmp_path / "ck")
        assert_equal(state_of(run), saved)


def test_an_unwritable_target_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with running(tmp_path / "store") as run:
        with pytest.raises(StoreError, match=r"checkpoint 'x' in .*file"):
            run.engine.save_checkpoint(tmp_path / "file", "x")
        run.steps(1)


def test_a_closed_engine_neither_saves_nor_loads(tmp_path: Path) -> None:
    run = Run(tmp_path / "store")
    run.steps(1)
    saving = run.engine.save_checkpoint(tmp_path / "ck")
    run.engine.close()
    assert saving.done()
    for call in (run.engine.save_checkpoint, run.engine.load_checkpoint):
        with pytest.raises(StateError, match="got a closed one"):
            call(tmp_path / "ck")
