"""A path that cannot be used, a budget that cannot work, an unknown option: one clear line each,
before anything is allocated, and nothing left behind."""

import copy
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import models
import pytest
import torch

from offload import OffloadEngine
from offload.errors import BudgetError, ConfigError, OffloadError, StateError, StoreError

HERE = Path(__file__).resolve().parent
NOBODY = 65534


def open_engine(model, **settings):
    defaults = {"param_persistence_threshold": 0, "dtype": "bfloat16", "compute_dtype": "float32"}
    return OffloadEngine(model, **defaults | settings)


def train_a_step(engine) -> float:
    loss = engine(*models.batch(0))
    engine.backward(loss)
    engine.step()
    return loss.item()


def refusal(kind: type[OffloadError], **settings) -> str:
    """The message of the refusal; the model, the process and the folder are as before."""
    model = models.build(models.Decoder)
    before = copy.deepcopy(model.state_dict())
    threads, files = threading.active_count(), open_files()
    with pytest.raises(kind) as raised:
        open_engine(model, **settings)
    message = str(raised.value)
    del raised
    assert threading.active_count() == threads
    assert open_files() == files
    assert "\n" not in message.strip()
    model(*models.batch(0)).backward()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    return message


def open_files() -> set[str]:
    """What this process has open, mappings and sockets included."""
    folder = Path("/proc/self/fd")
    found = set()
    for name in os.listdir(folder):
        try:
            found.add(f"{name} {(folder / name).readlink()}")
        except FileNotFoundError:  # the listing's own
            pass
    return found


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_scheduler_that_cannot_be_tracked_leaves_nothing_behind(tmp_path):
    def refused(**settings) -> None:
        model = models.build(models.Decoder)
        with pytest.raises(StateError, match="state_dict"):
            open_engine(model, nvme_path=tmp_path, lr_scheduler=object(), **settings)
        assert not any(module._forward_pre_hooks for module in model.modules())

    threads, files = threading.active_count(), open_files()
    refused()
    assert (threading.active_count(), open_files()) == (threads, files)
    assert contents(tmp_path) == []
    with open_engine(models.build(models.Decoder), nvme_path=tmp_path) as engine:
        train_a_step(engine)
    refused(resume=True)  # what was there before stays
    assert (threading.active_count(), open_files()) == (threads, files)
    with open_engine(models.build(models.Decoder), nvme_path=tmp_path, resume=True) as engine:
        assert engine.global_step == 1


def test_a_missing_path_is_named_and_not_created(tmp_path):
    path = tmp_path / "no such folder"
    message = refusal(StoreError, nvme_path=path)
    assert str(path) in message
    assert contents(tmp_path) == []


def test_a_path_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    assert str(path) in refusal(StoreError, nvme_path=path)
    assert path.read_text() == "mine"


def test_no_path_at_all_names_the_two_ways_to_give_one():
    message = refusal(ConfigError)
    assert "nvme_path" in message
    assert "--nvme" in message


def test_an_unwritable_path_is_refused_to_an_ordinary_user(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir()
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path.is_relative_to(tmp_path.parents[1]):
            path.chmod(0o555)
    try:
        child = run_as_nobody(folder)
    finally:
        for path in (folder, tmp_path):
            path.chmod(0o755)
    assert child["error"] == "StoreError", child
    assert str(folder) in child["message"]
    assert "\n" not in child["message"]
    assert contents(folder) == []


def run_as_nobody(folder: Path) -> dict[str, str]:
    """Open an engine on `folder` in a process without root's rights."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    child = subprocess.run(
        [sys.executable, str(HERE / "open_engine.py"), str(folder), str(NOBODY)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB; needs root."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "offload-test", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_refused_before_the_first_step(small_disk):
    message = refusal(StoreError, nvme_path=small_disk)
    assert str(small_disk) in message
    assert re.search(r"\d [kM]B", message), "it must tell the bytes it needs"
    assert contents(small_disk) == []
    (small_disk / "space").write_bytes(bytes(1_900_000))


@pytest.mark.parametrize("option", ["host_memory", "device_memory"])
def test_a_budget_too_small_shows_the_sum_and_the_least_that_works(option, tmp_path):
    message = refusal(BudgetError, nvme_path=tmp_path, **{option: "1KiB"})
    assert contents(tmp_path) == []
    assert "+" in message, "the arithmetic"
    least = int(re.search(rf"{option}=(\d+)", message)[1])
    assert f"{least:,}" in message
    again = refusal(BudgetError, nvme_path=tmp_path, **{option: least - 1})
    assert f"{option}={least}" in again
    engine = open_engine(models.build(models.Decoder), nvme_path=tmp_path, **{option: least})
    train_a_step(engine)
    engine.close()


def test_the_least_of_both_budgets_at_once_trains(tmp_path):
    smallest = {}
    for option in ("host_memory", "device_memory"):
        message = refusal(BudgetError, nvme_path=tmp_path, **{option: 1})
        smallest[option] = int(re.search(rf"{option}=(\d+)", message)[1])
    engine = open_engine(models.build(models.Decoder), nvme_path=tmp_path, **smallest)
    losses = [train_a_step(engine) for _ in range(3)]
    engine.close()
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"host_memroy": "1GiB"}, "host_memory"),
        ({"host_memory": "many"}, "host_memory"),
        ({"host_memory": -1}, "host_memory"),
        ({"chunk_elems": 1000}, "chunk_elems"),
        ({"dtype": "int8"}, "dtype"),
        ({"durability": "sometimes"}, "durability"),
        ({"optimizer": "sgdd"}, "optimizer"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
        ({"betas": (0.9, 1.5)}, "betas"),
        ({"lr": -1.0}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"params": []}, "param"),
        ({"resume": "maybe"}, "resume"),
        ({"param_persistence_threshold": -1}, "param_persistence_threshold"),
        ({"device": "cuda:99"}, "cuda"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_a_wrong_option_is_named(settings, words, tmp_path):
    assert words in refusal(ConfigError, nvme_path=tmp_path, **settings)
    assert contents(tmp_path) == []


def test_a_model_without_trainable_parameters_is_refused(tmp_path):
    model = models.build(models.Decoder).requires_grad_(False)
    with pytest.raises(ConfigError, match="requires_grad"):
        open_engine(model, nvme_path=tmp_path)
    assert contents(tmp_path) == []


def test_a_second_engine_on_one_model_is_refused_and_the_first_goes_on(tmp_path):
    model = models.build(models.Decoder)
    engine = open_engine(model, nvme_path=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(OffloadError, match="engine"):
        open_engine(model, nvme_path=tmp_path)
    assert contents(tmp_path) == before
    train_a_step(engine)
    engine.close()


def test_closing_twice_leaves_no_thread_and_no_open_file(tmp_path):
    open_engine(models.build(models.Decoder), nvme_path=tmp_path).close()  # lazy imports
    threads, files = threading.active_count(), open_files()
    tasks = len(os.listdir("/proc/self/task"))
    engine = open_engine(models.build(models.Decoder), nvme_path=tmp_path, resume=False)
    train_a_step(engine)
    assert open_files() > files
    engine.close()
    engine.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/task")) <= tasks
    assert open_files() == files
