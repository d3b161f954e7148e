"""Exported weights: the committed bits, under the names and in the form that others read."""

import json
import os
from pathlib import Path

import models
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from offload import OffloadEngine
from offload.cli.main import command
from offload.errors import ConfigError, OffloadError, StateError, StoreError


def open_engine(model, folder, **settings):
    defaults = {"param_persistence_threshold": 0, "dtype": "bfloat16", "compute_dtype": "float32"}
    return OffloadEngine(model, nvme_path=folder, **defaults | settings)


def train(engine, num_steps=2):
    for index in range(num_steps):
        engine.backward(engine(*models.batch(index)))
        engine.step()


def load_shards(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, as the index places them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as shard:
            found[name] = shard.get_tensor(name)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype is other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.fixture(params=[0, 3000], ids=["all in the store", "small ones in memory"])
def engine(request, tmp_path):
    model = models.build(models.Decoder, tied=True, width=64)
    made = open_engine(model, tmp_path, param_persistence_threshold=request.param)
    train(made)
    yield made
    made.close()


def test_an_fp32_export_has_the_exact_masters(engine, tmp_path):
    engine.export(tmp_path / "out", dtype="fp32")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert same(
        exported, {n: engine.full_fp32_param(n) for n, _ in engine.module.named_parameters()}
    )


def test_a_bf16_export_has_the_weights_that_compute(engine, tmp_path):
    engine.export(tmp_path / "out", dtype="bf16")
    exported = load_file(tmp_path / "out/model.safetensors")
    weights = engine.module.state_dict()
    assert same(exported, {name: weights[name] for name, _ in engine.module.named_parameters()})
    rounded = engine.full_fp32_param("embed.weight")
    halves = rounded.view(torch.int32).add(1 << 15).bitwise_right_shift(16).to(torch.int16)
    assert torch.equal(exported["embed.weight"].view(torch.int16), halves), "ties away from zero"


@pytest.mark.parametrize("threshold", [0, 3000])
def test_an_fp16_model_is_exported_as_it_moves_or_from_its_masters(threshold, tmp_path):
    settings = {"dtype": "fp16", "loss_scale": 64, "param_persistence_threshold": threshold}
    model = models.build(models.Decoder, tied=True, width=64)
    with open_engine(model, tmp_path, name="half", **settings) as engine:
        train(engine)
        masters = {n: engine.full_fp32_param(n) for n, _ in model.named_parameters()}
        for name in (None, "fp16", "bf16", "fp32"):
            engine.export(tmp_path / str(name), dtype=name)
    told = CliRunner().invoke(
        command, ["export", str(tmp_path / "offload-half"), str(tmp_path / "0")]
    )
    assert told.exit_code == 0, told.output
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for name in ("None", "0", "fp16", "bf16", "fp32"):
        exported = load_file(tmp_path / name / "model.safetensors")
        dtype = types.get(name, torch.float16)
        assert same(exported, {key: value.to(dtype) for key, value in masters.items()}), name


def test_weights_beyond_fp16_are_not_exported_as_infinite(tmp_path):
    model = models.build(models.Decoder, tied=True, width=64)
    model.head.weight.data[3, 5] = 1e5
    with (
        open_engine(model, tmp_path) as engine,
        pytest.raises(StateError, match="within float16's range"),
    ):
        engine.export(tmp_path / "out", dtype="fp16")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_shards_respect_their_size_and_the_index_finds_everything(engine, tmp_path):
    engine.export(tmp_path / "one", dtype="fp32")
    engine.export(tmp_path / "many", dtype="fp32", max_shard_size="70kB")
    assert same(load_shards(tmp_path / "many"), load_file(tmp_path / "one/model.safetensors"))
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert shards == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    for shard in shards:
        tensors = load_file(tmp_path / "many" / shard)
        total = sum(tensor.nbytes for tensor in tensors.values())
        assert total <= 70_000 or len(tensors) == 1


def test_data_begins_on_a_page(engine, tmp_path):
    engine.export(tmp_path / "out")
    start = (tmp_path / "out/model.safetensors").read_bytes()[:8]
    assert (8 + int.from_bytes(start, "little")) % 4096 == 0


def test_tied_weights_are_written_once_and_load_tied(engine, tmp_path):
    engine.export(tmp_path / "out", dtype="fp32")
    path = tmp_path / "out/model.safetensors"
    with safe_open(path, "pt") as file:
        assert "head.weight" not in list(file.keys())
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    other = models.build(models.Decoder, tied=True, width=64, seed=9)
    assert load_model(other, path) == (set(), [])
    assert torch.equal(other.head.weight, engine.full_fp32_param("embed.weight"))


class Corners(models.Decoder):
    """Buffers of both kinds, frozen tensors, and a parameter that no engine manages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("derived", torch.rand(3), persistent=False)
        self.doubled = nn.Parameter(torch.rand(6).double(), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.3), requires_grad=False)
        self.blocks[1].requires_grad_(False)

    def forward(self, *batch):
        return super().forward(*batch) + self.scalar


@pytest.mark.parametrize("threshold", [0, 10**9])
def test_buffers_frozen_and_unmanaged_parameters_are_there_in_their_own_types(threshold, tmp_path):
    model = models.build(Corners)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    doubled = model.doubled.detach().clone()
    with open_engine(
        model, tmp_path, param_persistence_threshold=threshold, dtype="float32"
    ) as engine:
        train(engine)
        engine.module.steps += 1
        engine.export(tmp_path / "out")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == models.build(Corners).state_dict().keys()
    assert "derived" not in exported
    assert exported["steps"].item() == 8
    assert exported["mask"].dtype is torch.bool
    assert torch.equal(exported["doubled"], doubled)
    assert all(torch.equal(exported[name], value) for name, value in frozen.items())


def test_an_export_sees_the_step_that_was_just_taken_and_training_goes_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        open_engine(models.build(models.Decoder), tmp_path / "a") as engine,
        open_engine(models.build(models.Decoder), tmp_path / "b") as quiet,
    ):
        train(engine)
        engine.export(tmp_path / "out", dtype="fp32")
        train(quiet)
        for name, value in load_file(tmp_path / "out/model.safetensors").items():
            assert torch.equal(value, quiet.full_fp32_param(name))
        train(engine, 1)
        train(quiet, 1)
        name = "blocks.0.qkv.weight"
        assert torch.equal(engine.full_fp32_param(name), quiet.full_fp32_param(name))


def test_a_folder_that_holds_a_model_is_left_alone(engine, tmp_path):
    engine.export(tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(StoreError, match="got model"):
        engine.export(tmp_path / "out", dtype="fp32")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before


def test_what_an_export_that_died_has_left_is_removed(engine, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model-00001-of-00002.safetensors.partial").write_bytes(b"half")
    engine.export(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_a_full_disk_is_told_with_bytes_and_leaves_nothing(engine, tmp_path, monkeypatch):
    real = os.posix_fallocate

    def full(fd: int, offset: int, num_bytes: int) -> None:
        if "model-00003" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        real(fd, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"expected [\d,]+ free bytes, got [\d,]+ \(No space"):
        engine.export(tmp_path / "out", max_shard_size="70kB")
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.undo()
    train(engine, 1)
    engine.export(tmp_path / "out", max_shard_size="70kB")


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"max_shard_size": "big"}])
def test_a_wrong_option_is_named_before_anything_is_written(settings, engine, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(settings.values()))):
        engine.export(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_closed_engine_refuses(tmp_path):
    engine = open_engine(models.build(models.Decoder), tmp_path)
    engine.close()
    with pytest.raises(OffloadError, match="closed"):
        engine.export(tmp_path / "out")
