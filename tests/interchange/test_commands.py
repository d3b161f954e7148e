"""offload export and offload import."""

import contextlib
import json

import models
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_model

from offload import OffloadEngine
from offload.cli.main import command
from offload.interchange import stored

SETTINGS = {"param_persistence_threshold": 2000, "dtype": "bfloat16", "compute_dtype": "float32"}


def offload(*arguments: object) -> tuple[int, str]:
    """Status and output; in this process."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


class Counting(models.Decoder):
    """With a buffer that changes in each forward."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, *batch):
        self.calls += 1
        return super().forward(*batch)


def train(engine, num_steps=2) -> None:
    for index in range(num_steps):
        engine.backward(engine(*models.batch(index)))
        engine.step()


@pytest.fixture(params=[1, 2], ids=["one path", "two paths"])
def trained(request, tmp_path):
    """The folders of a closed store, and the masters that it held."""
    paths = [tmp_path / f"drive-{i}" for i in range(request.param)]
    for path in paths:
        path.mkdir()
    with OffloadEngine(models.build(Counting), nvme_path=paths, name="t", **SETTINGS) as engine:
        train(engine)
        names = [name for name, _ in engine.module.named_parameters()]
        masters = {name: engine.full_fp32_param(name) for name in names}
        weights = {name: engine.module.state_dict()[name].clone() for name in names}
    return [path / "offload-t" for path in paths], masters, weights


def same(exported, weights) -> bool:
    return exported.keys() - {"calls"} == weights.keys() and all(
        torch.equal(exported[name], value) for name, value in weights.items()
    )


def test_a_closed_store_is_exported_without_its_model(trained, tmp_path):
    folders, masters, weights = trained
    status, output = offload("export", *folders, tmp_path / "out", "--dtype", "fp32")
    assert status == 0, output
    assert "generation 2" in output
    exported = load_file(tmp_path / "out/model.safetensors")
    assert same(exported, masters)
    assert exported["calls"].item() == 2
    assert offload("export", *folders, tmp_path / "half")[0] == 0
    assert same(load_file(tmp_path / "half/model.safetensors"), weights)


def test_paths_may_be_given_in_another_order(trained, tmp_path):
    folders, masters, _ = trained
    assert offload("export", *folders[::-1], tmp_path / "out", "--dtype", "fp32")[0] == 0
    assert same(load_file(tmp_path / "out/model.safetensors"), masters)


def test_shards_have_the_size_that_was_asked_for(trained, tmp_path):
    folders, masters, _ = trained
    offload("export", *folders, tmp_path / "out", "--dtype", "fp32", "--max-shard-size", "50kB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    found = {}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(shard)
    assert same(found, masters)


def test_the_single_fp32_file_has_every_name_of_a_tied_weight(trained, tmp_path):
    folders, masters, _ = trained
    assert offload("export", *folders, tmp_path / "out", "--zero-to-fp32")[0] == 0
    state = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert torch.equal(state["head.weight"], masters["embed.weight"])
    assert {value.dtype for name, value in state.items() if name != "calls"} == {torch.float32}
    fresh = Counting()
    fresh.load_state_dict(state)
    assert all(torch.equal(p, masters[name]) for name, p in fresh.named_parameters())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]


def test_a_store_that_is_in_use_is_exported_at_its_last_commit(tmp_path):
    with OffloadEngine(models.build(Counting), nvme_path=tmp_path, name="t", **SETTINGS) as engine:
        status, output = offload("export", tmp_path / "offload-t", tmp_path / "out")
        assert status == 0, output
        assert "generation 0" in output
        assert load_file(tmp_path / "out/model.safetensors")["calls"].item() == 0
        train(engine, 1)


def test_a_store_that_goes_on_while_it_is_read_is_refused_and_nothing_is_left(
    tmp_path, monkeypatch
):
    with OffloadEngine(models.build(Counting), nvme_path=tmp_path, name="t", **SETTINGS) as engine:
        train(engine, 1)
        open_source = stored.open_source

        @contextlib.contextmanager
        def and_train(folders):
            with open_source(folders) as source:
                train(engine, 2)
                yield source

        monkeypatch.setattr(stored, "open_source", and_train)
        for option in ((), ("--zero-to-fp32",)):
            status, output = offload("export", tmp_path / "offload-t", tmp_path / "out", *option)
            assert status == 1
            assert "overwritten" in output
            assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("given", ["the directory", "the checkpoint"])
def test_a_checkpoint_is_exported(given, tmp_path):
    with OffloadEngine(models.build(Counting), nvme_path=tmp_path, name="t", **SETTINGS) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved", "two").wait()
        masters = {n: engine.full_fp32_param(n) for n, _ in engine.module.named_parameters()}
        train(engine, 1)
    source = tmp_path / "saved" / ("two" if given == "the checkpoint" else "")
    status, output = offload("export", source, tmp_path / "out", "--dtype", "fp32")
    assert status == 0, output
    exported = load_file(tmp_path / "out/model.safetensors")
    assert same(exported, masters)
    assert exported["calls"].item() == 2


def test_a_wrong_source_is_one_line(tmp_path):
    status, output = offload("export", tmp_path, tmp_path / "out")
    assert status == 1
    assert len(output.splitlines()) == 1
    assert "offload-NAME" in output
    assert not (tmp_path / "out").exists()


def test_half_precision_and_zero_to_fp32_contradict_each_other(tmp_path):
    status, output = offload("export", tmp_path, tmp_path, "--zero-to-fp32", "--dtype", "bf16")
    assert status == 2
    assert "fp32" in output


def build_decoder() -> models.Decoder:
    return models.Decoder(tied=True)


def test_an_imported_model_is_trained_from(tmp_path):
    saved = models.build(models.Decoder, tied=True)
    (tmp_path / "saved").mkdir()
    save_model(saved, str(tmp_path / "saved/model.safetensors"))
    function = ("--make", f"{__name__}:build_decoder")
    settings = ("--nvme", tmp_path, "--dtype", "fp32", "--persistence-threshold", 2000)
    arguments = ("import", tmp_path / "saved", *settings, *function)
    status, output = offload(*arguments)
    assert status == 0, output
    assert "generation 0" in output
    settings = SETTINGS | {"dtype": "float32", "nvme_path": tmp_path, "resume": True}
    with OffloadEngine(build_decoder(), **settings) as engine:
        assert engine.resumed
        for name, parameter in saved.named_parameters():
            assert torch.equal(engine.full_fp32_param(name), parameter)
        train(engine)
    status, output = offload(*arguments)
    assert status == 1
    assert "--fresh" in output
    assert "resume" not in output
    assert offload(*arguments, "--fresh")[0] == 0


def test_a_function_that_is_not_there_is_one_line(tmp_path):
    status, output = offload("import", tmp_path, "--nvme", tmp_path, "--make", "models:Nothing")
    assert status == 2
    assert "Nothing" in output
