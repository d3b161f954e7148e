"""What is damaged, missing or of another version is named, refused and not overwritten."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import models
import pytest
from checkpoint_run import Run, assert_equal, running, state_of

from offload.errors import StoreCorrupt, StoreError
from offload.store import format
from offload.store.inspect import describe, verify

BLOCK = 4096


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def data_file(folder: Path, unit: str) -> Path:
    (path,) = [path for path in folder.iterdir() if unit in path.name and ".next" not in path.name]
    return path


def other_version(path: Path) -> None:
    """As a later release would have written it: version and checksum."""
    block = bytearray(path.read_bytes()[:BLOCK])
    block[8:12] = (format.VERSION + 1).to_bytes(4, "little")
    with path.open("r+b") as file:
        file.write(block)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights": (lambda f: flip(data_file(f, "blocks.0"), BLOCK), r"'blocks\.0'.*param, block 0"),
    "moments": (
        lambda f: flip(data_file(f, "embed"), os.path.getsize(data_file(f, "embed")) - 2 * BLOCK),
        r"'embed'.*exp_avg_sq, block 0",
    ),
    "checksums": (
        lambda f: flip(data_file(f, "embed"), os.path.getsize(data_file(f, "embed")) - BLOCK),
        r"'embed'.*checksums are not those that were committed",
    ),
    "small tensors": (lambda f: flip(data_file(f, "persistent"), BLOCK), "'persistent'.*param"),
    "header": (lambda f: flip(data_file(f, "head"), 70), r"'head'.*header is damaged"),
    "manifest": (lambda f: flip(f / "MANIFEST", 200), "MANIFEST: expected checksum"),
    "record": (lambda f: flip(f / "COMMIT.1", 50), r"COMMIT\.1.*header is damaged"),
    "payload": (
        lambda f: flip(f / "COMMIT.1", os.path.getsize(f / "COMMIT.1") - 10),
        r"COMMIT\.1.*torn or damaged",
    ),
    "note": (lambda f: flip(f / "CHECKPOINT", 60), "CHECKPOINT: expected checksum"),
    "cut file": (
        lambda f: os.truncate(data_file(f, "blocks.1"), 3 * BLOCK),
        r"'blocks\.1'.*truncated or overgrown",
    ),
    "missing file": (lambda f: data_file(f, "blocks.0").unlink(), r"'blocks\.0'.*is missing"),
    "other version": (
        lambda f: other_version(data_file(f, "embed")),
        r"'embed'.*expected format version 1, got 2",
    ),
    "other store's file": (
        lambda f: shutil.copyfile(data_file(f, "blocks.0"), data_file(f, "blocks.1")),
        r"'blocks\.1'",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, first_run: None) -> Path:
    root = tmp_path_factory.mktemp("saved")
    with running(root / "store") as run:
        run.steps(2)
        return run.engine.save_checkpoint(root / "ck", "x").wait()


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_run_goes_on(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    damage, expected = DAMAGES[kind]
    folder = Path(shutil.copytree(saved, tmp_path / "ck" / "x"))
    damage(folder)
    with running(tmp_path / "store", seed=3) as run:
        run.steps(1)
        before = state_of(run)
        with pytest.raises(StoreError, match=expected):
            run.engine.load_checkpoint(tmp_path / "ck", "x")
        assert_equal(state_of(run), before)
        run.steps(1)
    with running(tmp_path / "store", seed=4, resume=True) as run:
        assert run.engine.global_step == 2


def test_an_undamaged_copy_loads(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "ck" / "x")
    with running(tmp_path / "store", seed=3) as run:
        run.engine.load_checkpoint(tmp_path / "ck", "x")
        assert run.engine.global_step == 2


def stopped(path: Path, **options: object) -> Path:
    """A closed store after two steps; its folder."""
    with running(path, **options) as run:
        run.steps(2)
        return run.store_folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "LOCK"}


def test_a_store_is_verified_whole_after_steps_edits_and_loads(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(3)
        frozen = dict(run.engine.module.named_parameters())["blocks.1.up.weight"]
        with run.engine.gathered(frozen):
            frozen.data.mul_(2.0)
        run.steps(1)
        run.engine.save_checkpoint(tmp_path / "ck")
        run.steps(1)
        run.engine.load_checkpoint(tmp_path / "ck")
        run.steps(2)
        name = run.store_folder.name.removeprefix("offload-")
    results = dict(verify([tmp_path / "store"], name))
    assert len(results) == 6
    assert not any(results.values()), results


def committed_file(folder: Path, unit: str) -> Path:
    name = folder.name.removeprefix("offload-")
    record = describe([folder.parent], name).record
    assert record is not None
    side = "AB"[record.sides[unit]]
    (path,) = folder.glob(f"*-{unit}.r0.{side}")
    return path


STORE_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut file": (
        lambda f: os.truncate(committed_file(f, "blocks.1"), BLOCK),
        r"'blocks\.1'.*truncated or overgrown",
    ),
    "missing file": (lambda f: committed_file(f, "embed").unlink(), "'embed'.*is missing"),
    "header": (lambda f: flip(committed_file(f, "head"), 70), "'head'.*header is damaged"),
    "other version": (
        lambda f: other_version(committed_file(f, "embed")),
        "'embed'.*expected format version 1, got 2",
    ),
    "manifest": (lambda f: flip(f / "MANIFEST", 200), "MANIFEST: expected checksum"),
    "both records": (
        lambda f: [flip(f / name, 50) for name in ("COMMIT.0", "COMMIT.1")],
        "holds no valid generation.*Restore a checkpoint, or discard it .*--fresh",
    ),
    "missing path": (
        lambda f: f.rename(f.parent.parent / "gone"),
        "expected a store at .*got none",
    ),
}


@pytest.mark.parametrize("kind", STORE_DAMAGES)
def test_a_store_that_cannot_be_resumed_is_refused_and_left_as_it_is(
    tmp_path: Path, kind: str
) -> None:
    folder = stopped(tmp_path / "store")
    damage, expected = STORE_DAMAGES[kind]
    damage(folder)
    before = content(folder) if folder.exists() else {}
    with pytest.raises(StoreError, match=expected):
        Run(tmp_path / "store", resume=True)
    assert (content(folder) if folder.exists() else {}) == before


def test_a_store_that_exists_is_not_touched_unless_that_is_asked_for(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "store")
    before = content(folder)
    with pytest.raises(StoreError, match=r"--resume.*--fresh"):
        Run(tmp_path / "store")
    assert content(folder) == before
    with running(tmp_path / "store", resume=False) as run:
        assert run.engine.global_step == 0


def test_another_model_over_a_named_store_shows_the_difference_and_the_ways_out(
    tmp_path: Path,
) -> None:
    folder = stopped(tmp_path / "store", name="mine")
    before = content(folder)
    for options in ({"model": partial(models.Decoder, width=32)}, {"dtype": "float32"}):
        with pytest.raises(StoreError, match=r"expected .*, got .*--fresh") as error:
            Run(tmp_path / "store", name="mine", resume=True, **options)
        assert "was made for another model or other settings" in str(error.value)
    assert content(folder) == before


def test_resuming_with_other_settings_tells_of_the_store_that_is_there(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "store")
    before = content(folder)
    with pytest.raises(StoreError, match=r"expected a store at .* got none") as error:
        Run(tmp_path / "store", resume=True, dtype="float32")
    assert f"There is '{folder.name.removeprefix('offload-')}', made for another" in str(
        error.value
    )
    assert 'dtype: expected "float32", got "bfloat16"' in str(error.value)
    assert "without resuming" in str(error.value)
    assert content(folder) == before


def test_the_rotten_block_of_a_resumed_store_is_named_by_a_verification(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "store")
    name = folder.name.removeprefix("offload-")
    flip(committed_file(folder, "blocks.0"), BLOCK + 100)
    (problem,) = dict(verify([tmp_path / "store"], name))["blocks.0"]
    assert "param, block 0" in problem


def test_rot_in_what_is_saved_is_found_when_it_is_copied(tmp_path: Path, other_drive: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(1)
        run.engine.save_checkpoint(other_drive, "good").wait()
        flip(committed_file(run.store_folder, "blocks.0"), BLOCK + 100)
        saving = run.engine.save_checkpoint(other_drive, "bad")
        with pytest.raises(StoreCorrupt, match=r"'blocks\.0'.*param, block 0"):
            saving.wait()
        assert sorted(os.listdir(other_drive)) == ["good", "latest"]
        assert (other_drive / "latest").read_text() == "good\n"


def test_a_one_sided_store_is_not_resumed_with_more_than_it_can_promise(tmp_path: Path) -> None:
    stopped(tmp_path / "store", durability="none")
    with pytest.raises(StoreError, match=r"expected two sides.*got one.*Go on with that"):
        Run(tmp_path / "store", resume=True)
    with running(tmp_path / "store", resume=True, durability="none") as run:
        assert run.engine.global_step == 2


def test_a_moved_store_resumes(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "store")
    (tmp_path / "elsewhere").mkdir()
    folder.rename(tmp_path / "elsewhere" / folder.name)
    with running(tmp_path / "elsewhere", seed=5, resume=True) as run:
        assert run.engine.global_step == 2
        run.steps(1)
