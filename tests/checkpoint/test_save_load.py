"""save_checkpoint and load_checkpoint: what comes back is what was there, bit for bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_run import CONTINUED, SAVED_AT, Reference, Run, assert_equal, running, state_of

from offload.errors import ConfigError, StateError, StoreError
from offload.store.inspect import verify

PLACEMENTS = [
    {},
    {"chunk_elems": 2048, "host_memory": "3MiB", "overlap": "hold"},
    {"chunk_elems": None, "host_memory": None, "device_memory": "200MiB", "overlap": "speculate"},
    {"durability": "step", "aio_backend": "threads"},
    {"durability": "none"},
]


@pytest.mark.parametrize("settings", PLACEMENTS, ids=lambda s: "-".join(s) or "same")
def test_a_checkpoint_continues_bit_for_bit_under_any_placement(
    reference: Reference, tmp_path: Path, settings: dict[str, Any]
) -> None:
    with running(tmp_path / "other", seed=3, **settings) as run:
        run.steps(2)
        path, client_state = run.engine.load_checkpoint(reference.checkpoints)
        assert (path, client_state) == (reference.checkpoints / "five", {"note": "hello"})
        assert_equal(state_of(run), reference.saved)
        del run.losses[:]
        run.steps(CONTINUED)
        assert run.losses == reference.losses
        assert_equal(state_of(run), reference.after)


@pytest.mark.parametrize("threshold", [0, 3000, 10**6])
def test_it_loads_where_other_tensors_are_small(
    reference: Reference, tmp_path: Path, threshold: int
) -> None:
    settings = {"param_persistence_threshold": threshold}
    with running(tmp_path / "other", seed=3, **settings) as run:
        run.steps(1)
        run.engine.load_checkpoint(reference.checkpoints)
        assert_equal(state_of(run), reference.saved)
        run.steps(CONTINUED)
        assert_equal(state_of(run), reference.after)
        name = run.store_folder.name.removeprefix("offload-")
    assert not any(problems for _, problems in verify([tmp_path / "other"], name))
    with running(tmp_path / "other", seed=4, resume=True, **settings) as run:
        assert_equal(state_of(run), reference.after)


def test_a_checkpoint_before_the_first_step_loads_where_other_tensors_are_small(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "store") as run:
        run.engine.save_checkpoint(tmp_path / "ck").wait()
        run.steps(2)
        after = state_of(run)
    with running(tmp_path / "other", seed=3, param_persistence_threshold=3000) as run:
        run.steps(2)
        run.engine.load_checkpoint(tmp_path / "ck")
        run.steps(2)
        assert_equal(state_of(run), after)


def test_it_loads_over_several_paths_and_resumes_from_them(
    reference: Reference, tmp_path: Path
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with running(tmp_path / "run", seed=3, nvme_path=paths) as run:
        run.engine.load_checkpoint(reference.checkpoints, "five")
        run.steps(1)
    with running(tmp_path / "run", seed=4, nvme_path=paths[::-1], resume=True) as run:
        run.steps(CONTINUED - 1)
        assert_equal(state_of(run), reference.after)
        assert all(list(path.glob("offload-*/*.A")) for path in paths)


def test_weights_moved_between_the_save_and_the_end(reference: Reference) -> None:
    moved = [key for key in reference.saved if reference.saved[key] != reference.after[key]]
    frozen = [name for name in reference.saved if name.startswith("blocks.2.")]
    assert not set(moved) & set(frozen)
    assert len(moved) > 20


def test_on_one_file_system_the_data_is_linked_and_stays_as_it_was(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(3)
        folder = run.engine.save_checkpoint(tmp_path / "ck").wait()
        linked = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".A"}
        linked |= {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".B"}
        assert all((folder / name).stat().st_nlink == 2 for name in linked)
        for name in linked:
            assert (folder / name).samefile(run.store_folder / name)
        run.steps(4)
        assert {name: (folder / name).read_bytes() for name in linked} == linked
        trained = [name for name in linked if not name.startswith("00003-")]  # the frozen block
        assert all((folder / name).stat().st_nlink == 1 for name in trained)


def test_to_another_drive_it_copies_while_training_goes_on(
    reference: Reference, tmp_path: Path, other_drive: Path
) -> None:
    with running(tmp_path / "store") as run:
        run.steps(SAVED_AT)
        saving = run.engine.save_checkpoint(other_drive, "five")
        run.steps(CONTINUED)
        folder = saving.wait()
        assert run.losses[SAVED_AT:] == reference.losses
        run.steps(1)
        assert not list(run.store_folder.glob("pin-*"))
        assert not list(run.store_folder.glob("*.next"))
    assert all(path.stat().st_nlink == 1 for path in folder.iterdir())
    with running(tmp_path / "other", seed=3) as run:
        run.engine.load_checkpoint(other_drive)
        run.steps(CONTINUED)
        assert_equal(state_of(run), reference.after)


def test_a_checkpoint_loads_into_the_run_that_saved_it_and_training_repeats(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "store") as run:
        run.steps(2)
        run.engine.save_checkpoint(tmp_path / "ck", "a")
        saved = state_of(run)
        run.steps(3)
        first = state_of(run)
        for _ in range(2):
            run.engine.load_checkpoint(tmp_path / "ck", "a")
            assert_equal(state_of(run), saved)
            run.steps(3)
            assert_equal(state_of(run), first)


def test_a_loaded_checkpoint_is_the_generation_that_a_restart_finds(
    reference: Reference, tmp_path: Path
) -> None:
    with running(tmp_path / "store", seed=3) as run:
        run.steps(1)
        run.engine.load_checkpoint(reference.checkpoints)
    with running(tmp_path / "store", seed=4, resume=True) as run:
        assert_equal(state_of(run), reference.saved)
        run.steps(CONTINUED)
        assert_equal(state_of(run), reference.after)


def test_generation_zero_can_be_saved(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.engine.save_checkpoint(tmp_path / "ck").wait()
        before = state_of(run)
        run.steps(2)
        run.engine.load_checkpoint(tmp_path / "ck", "global_step0")
        assert_equal(state_of(run), before)


def test_the_same_tag_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        for _ in range(3):
            run.steps(1)
            folder = run.engine.save_checkpoint(tmp_path / "ck", "same").wait()
        saved = state_of(run)
        assert sorted(os.listdir(tmp_path / "ck")) == ["latest", "same"]
        run.steps(2)
        assert run.engine.load_checkpoint(tmp_path / "ck")[0] == folder
        assert_equal(state_of(run), saved)


def test_keep_removes_the_oldest_and_their_space_comes_back(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        for _ in range(5):
            run.steps(1)
            run.engine.save_checkpoint(tmp_path / "ck", keep=2)
        run.steps(1)
        run.engine.save_checkpoint(tmp_path / "ck", "last", keep=1).wait()
        assert sorted(os.listdir(tmp_path / "ck")) == ["last", "latest"]
        assert (tmp_path / "ck" / "latest").read_text() == "last\n"
        run.steps(2)
        run.engine.save_checkpoint(tmp_path / "ck", "last", keep=1).wait()
        shared = [path for path in run.store_folder.glob("0*") if path.stat().st_nlink > 1]
        reserved = sorted(path.name for path in run.store_folder.glob("*.next"))
        trained = [path.name for path in shared if not path.name.startswith("00003-")]
        assert reserved == sorted(f"{name}.next" for name in trained)


def test_a_step_whose_scheduler_has_not_stepped_is_discarded_when_the_script_is_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop_between_step_and_schedule(run: Run) -> None:
        with run.engine:
            run.engine.backward(run.engine(*run.epochs.next()))
            run.engine.step()
            raise SystemExit(143)

    run = Run(tmp_path / "store")
    run.steps(2)
    with pytest.raises(SystemExit):
        stop_between_step_and_schedule(run)
    assert "step to generation 3 is discarded" in caplog.text
    with running(tmp_path / "store", resume=True) as run:
        assert (run.engine.global_step, run.scheduler.last_epoch) == (2, 2)
        run.steps(1)
        run.engine.backward(run.engine(*run.epochs.next()))
        run.engine.step()  # close() is told by the script: this step counts
    with running(tmp_path / "store", resume=True) as run:
        assert (run.engine.global_step, run.scheduler.last_epoch) == (4, 3)


def test_without_any_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(1)
        before = state_of(run)
        assert run.engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
        assert_equal(state_of(run), before)


def test_a_tag_that_is_not_there_is_named_with_those_that_are(
    reference: Reference, tmp_path: Path
) -> None:
    with running(tmp_path / "store") as run:
        with pytest.raises(StoreError, match=r"'six'.* got these: five\. Name one of them"):
            run.engine.load_checkpoint(reference.checkpoints, "six")
        for tag in ("../x", "", ".hidden", "latest", "a/b"):
            with pytest.raises(ConfigError, match="checkpoint tag: expected"):
                run.engine.save_checkpoint(tmp_path / "ck", tag or "/")
        with pytest.raises(ConfigError, match="keep: expected at least 1"):
            run.engine.save_checkpoint(tmp_path / "ck", keep=0)
    assert not (tmp_path / "ck").exists()


def test_another_model_is_refused_with_the_difference_and_nothing_changes(
    reference: Reference, tmp_path: Path
) -> None:
    import models

    with running(tmp_path / "store", model=partial(models.Decoder, width=32)) as run:
        run.steps(1)
        before = state_of(run)
        with pytest.raises(StoreError) as error:
            run.engine.load_checkpoint(reference.checkpoints)
        assert "saved from another model" in str(error.value)
        assert "embed.weight.shape" in str(error.value)
        assert_equal(state_of(run), before)
        run.steps(1)


def test_a_model_with_other_buffers_is_refused_before_anything_changes(
    reference: Reference, tmp_path: Path
) -> None:
    import models

    with running(tmp_path / "store", model=models.Decoder) as run:
        run.steps(1)
        before = state_of(run)
        with pytest.raises(StateError, match="buffer 'mean': expected shape None"):
            run.engine.load_checkpoint(reference.checkpoints)
        assert_equal(state_of(run), before)
        run.steps(1)


def test_another_number_of_groups_is_refused_before_anything_changes(
    reference: Reference, tmp_path: Path
) -> None:
    run = Run(tmp_path / "store")
    group = run.engine.optimizer.param_groups[0]
    run.engine.optimizer.param_groups.append({**group, "params": []})
    before = state_of(run)
    with pytest.raises(StateError, match="expected 1 parameter groups"):
        run.engine.load_checkpoint(reference.checkpoints)
    assert_equal(state_of(run), before)
    run.engine.close()


def test_client_state_that_needs_code_to_be_read_is_refused_when_it_is_saved(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "store") as run:
        with pytest.raises(StateError, match="expected client_state and tracked objects of plain"):
            run.engine.save_checkpoint(tmp_path / "ck", client_state={"run": Path("x")})
        plain = {"epoch": 3, "names": ["a", None], "tensor": torch.arange(3), "x": (1.5, True)}
        run.engine.save_checkpoint(tmp_path / "ck", client_state=plain)
        _, found = run.engine.load_checkpoint(tmp_path / "ck")
        assert torch.equal(found.pop("tensor"), plain.pop("tensor"))
        assert found == plain


def test_gradients_that_no_step_has_used_are_not_saved_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path / "store") as run:
        run.engine.backward(run.engine(*run.epochs.next()))
        run.engine.save_checkpoint(tmp_path / "ck").wait()
        assert "gradients since the last step are not saved" in caplog.text
        run.engine.load_checkpoint(tmp_path / "ck")
        assert run.engine.kept_grad("embed.weight") is None
        run.steps(1)


def test_a_checkpoint_folder_can_be_named_itself_and_moved(
    reference: Reference, tmp_path: Path
) -> None:
    with running(tmp_path / "first") as run:
        run.steps(1)
        folder = run.engine.save_checkpoint(tmp_path / "ck", "x").wait()
        saved = state_of(run)
        moved = folder.rename(tmp_path / "elsewhere")
        run.steps(1)
        assert run.engine.load_checkpoint(moved)[0] == moved
        assert_equal(state_of(run), saved)
