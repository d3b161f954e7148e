"""A drive's profile: read back as it was written, refused in one line, and used by the engine."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import aio
from offload import OffloadEngine
from offload.errors import ConfigError
from offload.profile import FILE_NAME, Profile, choose, encode, find, load

PROFILE = Profile(
    path="/mnt/ä drive", date="2026-01-02T03:04:05", backend="threads", block_bytes=256 << 10,
    read_depth=5, write_depth=3, read_bytes_per_s=2e9, write_bytes_per_s=1.5e9,
    mixed_bytes_per_s=2.5e9,
)  # fmt: skip


def lay(folder: Path, profile: Profile = PROFILE) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / FILE_NAME
    file.write_text(encode(profile))
    return file


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = lay(tmp_path)
    assert load(file) == load(tmp_path) == find(tmp_path) == PROFILE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no text"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "JSON of another kind"),
        (b'{"train_batch_size": 1}', "JSON of another kind"),
        (b" " * (2 << 20), "too large"),
        ({"version": 2}, "version 2, this release reads 1"),
        ({"backend": "magic"}, "backend: expected uring, libaio, threads, got 'magic'"),
        ({"block_bytes": 1000}, "block_bytes: expected 4096 to"),
        ({"block_bytes": 5000}, "block_bytes: expected a multiple of 4096"),
        ({"block_bytes": "1MiB"}, "block_bytes"),
        ({"read_depth": 0}, "read_depth"),
        ({"write_depth": True}, "write_depth"),
        ({"mixed_bytes_per_s": 0}, "mixed_bytes_per_s"),
        ({"read_bytes_per_s": float("nan")}, "read_bytes_per_s"),
        ({"path": None}, "path: expected text"),
    ],
)
def test_a_damaged_or_alien_profile_is_one_line(
    content: Any, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = lay(tmp_path)
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content).encode()
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load(file)
    message = str(refused.value)
    assert says in message
    assert message.startswith(f"profile {file}: ")
    assert "\n" not in message
    assert find(tmp_path) is None  # nobody asked for it: training goes on, and says so
    assert [record.getMessage() for record in caplog.records] == [
        f"{message} Without it, defaults are used."
    ]


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match="no regular file"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no regular file"):
        load(Path("/dev/zero"))


def test_profiles_that_ask_for_too_much_together_are_refused_in_one_line(tmp_path: Path) -> None:
    drives = [tmp_path / str(number) for number in range(5)]
    for drive in drives:
        lay(drive, replace(PROFILE, read_depth=1024, write_depth=1024))
    with pytest.raises(ConfigError, match="on each of 5"):
        OffloadEngine(models.build(models.Decoder), nvme_path=drives)
    assert [list(drive.iterdir()) for drive in drives] == [[drive / FILE_NAME] for drive in drives]


def test_a_profile_that_is_named_and_missing_is_an_error(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    for place in (tmp_path, tmp_path / "x.json"):
        with pytest.raises(ConfigError, match="No such file"):
            choose([place], [tmp_path])


def test_every_path_has_its_profile_or_the_one_for_all(tmp_path: Path) -> None:
    fast = replace(PROFILE, mixed_bytes_per_s=5e9)
    files = [lay(tmp_path / "one"), lay(tmp_path / "two", fast)]
    folders = [file.parent for file in files]
    assert choose([], [*folders, tmp_path]) == [PROFILE, fast, None]
    assert choose(files[::-1], folders) == [fast, PROFILE]
    assert choose(files[:1], folders) == [PROFILE, PROFILE]
    with pytest.raises(ConfigError, match=r"one for each of 3 paths, got 2\."):
        choose(files, [*folders, tmp_path])


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How every queue was opened, as far as it got."""
    opened: list[dict[str, Any]] = []

    class Recorded(aio.Queue):
        def __init__(self, backend: str = "auto", **settings: Any) -> None:
            opened.append({"backend": backend, **settings})
            super().__init__(backend, **settings)

    monkeypatch.setattr(aio, "Queue", Recorded)
    return opened


def losses(*, num_steps: int = 2, **settings: Any) -> list[float]:
    defaults = {"param_persistence_threshold": 0, "dtype": "bfloat16", "compute_dtype": "float32"}
    found = []
    with OffloadEngine(models.build(models.Decoder), **defaults | settings) as engine:
        for index in range(num_steps):
            loss = engine(*models.batch(index))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    return found


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    folder = tmp_path / "drive"
    folder.mkdir()
    return folder


SETTING = {
    "backend": "threads", "block_bytes": 256 << 10, "read_depth": 5, "write_depth": 3,
    "num_drives": 1, "keep_stats": True,
}  # fmt: skip


@pytest.mark.parametrize("how", ["named", "found", "environment"])
def test_an_engine_opens_its_queue_as_the_profile_says(
    how: str, drive: Path, tmp_path: Path, queues: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lay(drive if how == "found" else tmp_path)
    if how == "environment":
        monkeypatch.setenv("OFFLOAD_PROFILE", str(file))
    losses(nvme_path=drive, **({"profile": file} if how == "named" else {}))
    assert queues == [SETTING]


def test_the_numbers_do_not_depend_on_the_profile(drive: Path, tmp_path: Path) -> None:
    without = losses(nvme_path=drive)
    assert losses(nvme_path=drive, profile=lay(tmp_path), resume=False) == without


def test_without_a_profile_defaults_are_used(drive: Path, queues: Any) -> None:
    losses(nvme_path=drive)
    assert queues == [
        {**SETTING, "backend": "auto", "block_bytes": 1 << 20, "read_depth": 8, "write_depth": 8}
    ]


def test_the_users_backend_outranks_the_profiles(drive: Path, queues: Any) -> None:
    lay(drive)
    losses(nvme_path=drive, aio_backend="libaio")
    assert queues == [{**SETTING, "backend": "libaio"}]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    real = aio.Queue

    def refuse(backend: str = "auto", **settings: Any) -> aio.Queue:
        if backend == "threads":
            raise OSError(1, "aio backend 'threads': not here")
        return real(backend, **settings)

    monkeypatch.setattr(aio, "Queue", refuse)


def test_a_backend_that_works_no_more_is_replaced_and_told(
    drive: Path, no_threads: None, caplog: pytest.LogCaptureFixture
) -> None:
    lay(drive)
    assert len(losses(nvme_path=drive)) == 2
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["the profile's backend does not work here: aio backend 'threads': not here."]


def test_a_backend_that_was_asked_for_and_does_not_work_is_one_line(
    drive: Path, no_threads: None
) -> None:
    with pytest.raises(ConfigError, match=r"aio_backend: aio backend 'threads': not here\.$"):
        losses(nvme_path=drive, aio_backend="threads")
    assert not list(drive.iterdir())


def test_a_named_profile_that_is_damaged_stops_the_engine_before_anything_is_made(
    drive: Path,
) -> None:
    file = lay(drive)
    file.write_text("{}")
    model = models.build(models.Decoder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="another kind"):
        OffloadEngine(model, nvme_path=drive, profile=file)
    assert list(drive.iterdir()) == [file]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_drives_share_bytes_and_depths_as_their_profiles_say(
    tmp_path: Path, queues: Any
) -> None:
    drives = [tmp_path / "slow", tmp_path / "fast"]
    lay(drives[0])
    lay(drives[1], replace(PROFILE, mixed_bytes_per_s=2 * PROFILE.mixed_bytes_per_s))
    model = models.build(models.Decoder, num_blocks=24)
    with OffloadEngine(
        model, nvme_path=drives, name="two", param_persistence_threshold=0
    ) as engine:
        engine.backward(engine(*models.batch(0)))
        engine.step()
    assert queues == [{**SETTING, "num_drives": 2}]
    slow, fast = (
        sum(file.stat().st_size for file in (drive / "offload-two").glob("0*")) for drive in drives
    )
    assert abs(fast / slow - 2) <= 0.2


def test_the_profile_is_told_where_the_engine_describes_itself(drive: Path) -> None:
    lay(drive)
    with OffloadEngine(models.build(models.Decoder), nvme_path=drive) as engine:
        line = next(line for line in engine.describe().splitlines() if line.startswith("engine"))
    assert "threads, blocks of 256 KiB, 5 + 3 in flight a drive (profile of /mnt/ä" in line


def test_every_field_of_a_profile_is_checked(tmp_path: Path) -> None:
    file = lay(tmp_path)
    for name in asdict(PROFILE).keys() - {"measured"}:  # that a profile may lack
        value = json.loads(encode(PROFILE))
        del value[name]
        file.write_text(json.dumps(value))
        with pytest.raises(ConfigError, match=name):
            load(file)
