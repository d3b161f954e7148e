"""What cannot be trained here, or was changed behind the engine: one line that says what to do."""

from __future__ import annotations

import dataclasses

import models
import pytest
import torch
import zoo
from case import (
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    engine_step,
    same_bits,
    train_in_memory,
    train_offloaded,
)
from torch import nn

from offload import OffloadEngine
from offload.errors import ConfigError, StateError

CASE = Case(kind=zoo.Small)


def one_step(engine, step: int = 0) -> None:
    engine_step(engine, CASE, step, Trained())


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    model = nn.ModuleDict({"rest": nn.Linear(3, 3)})
    model.register_parameter("odd", parameter)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 3)


UNTRAINABLE = {
    "complex": (lambda: with_parameter(nn.Parameter(torch.zeros(3, dtype=torch.complex64))), "odd"),
    "double": (lambda: nn.Linear(3, 3).double(), "weight.*float64"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight.*Run the model once"),
    "meta": (on_meta, "weight.*on_disk_init"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True)), "'0'.*sparse"),
    "sparse-bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True)), "'0'.*sparse"),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused_by_name(name, tmp_path):
    make, message = UNTRAINABLE[name]
    with pytest.raises(ConfigError, match=message):
        OffloadEngine(make(), nvme_path=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64, torch.bool])
def test_a_frozen_parameter_of_another_type_is_left_alone(dtype, tmp_path):
    odd = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
    with OffloadEngine(with_parameter(odd), nvme_path=tmp_path) as engine:
        assert engine.module.odd is odd
        assert torch.equal(engine.module.state_dict()["odd"], torch.ones(3, dtype=dtype))
        assert "odd" in engine.describe()


def replace(model: nn.Module) -> None:
    model.head = nn.Linear(zoo.WIDTH, models.VOCAB, bias=False)


def add(model: nn.Module) -> None:
    model.blocks.append(models.Block(zoo.WIDTH, 2))


@pytest.mark.parametrize(
    ("change", "name"), [(replace, "head.weight"), (add, r"blocks\.2\.norm_1\.weight")]
)
def test_a_module_that_came_later_is_refused_by_name(change, name, tmp_path):
    with CASE.engine(tmp_path) as engine:
        one_step(engine)
        change(engine.module)
        with pytest.raises(StateError, match=f"{name}.*never be trained.*export"):
            engine(*CASE.batches(1)[0])


def test_an_embedding_is_resized_before_wrapping_and_refused_after(tmp_path):
    case = dataclasses.replace(CASE, kind=Resized)
    with case.engine(tmp_path) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))
        with pytest.raises(StateError, match=r"embed\.weight.*gathered"):
            resize(engine.module, 80)
        with engine.gathered(engine.module.embed):
            resize(engine.module, 80)
        with pytest.raises(StateError, match=r"embed\.weight.*\(80, 24\).*resized"):
            engine(*case.batches(1)[0])


def resize(model: nn.Module, rows: int) -> None:
    old = model.embed.weight
    embed = nn.Embedding(rows, old.shape[1])
    with torch.no_grad():
        embed.weight[: old.shape[0]] = old
    model.embed = embed


class Resized(zoo.Small):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        resize(self, 70)


def test_what_was_frozen_and_is_in_no_group_cannot_be_thawed_without_a_word(tmp_path):
    case = dataclasses.replace(CASE, frozen=("blocks.1.",))
    with case.engine(tmp_path) as engine:
        one_step(engine)
        engine.module.blocks[1].requires_grad_(True)
        with pytest.raises(StateError, match=r"blocks\.1\..*expected it in a parameter group"):
            engine(*CASE.batches(1)[0])
        engine.module.blocks[1].requires_grad_(False)
        one_step(engine, 1)


def edit_and_go_on(engine: OffloadEngine, name: str, then: str) -> None:
    """The edit is refused at once where the parameter is evicted, else where it would be used."""
    with torch.no_grad():
        engine.module.get_parameter(name).mul_(2)
    engine(*CASE.batches(1)[0]) if then == "forward" else engine.step()


@pytest.mark.parametrize("name", ["blocks.0.up.weight", "norm.weight"])
@pytest.mark.parametrize("weights", ["device", "auto"])
@pytest.mark.parametrize("then", ["forward", "step"])
def test_an_edit_of_what_is_in_memory_counts_inside_gathered_only(name, weights, then, tmp_path):
    settings = {} if weights == "auto" else {"placement": {"weights": weights, "state": "disk"}}
    expected = train_in_memory(CASE)
    with CASE.engine(tmp_path, device_memory="64MiB", **settings) as engine:
        one_step(engine)
        if then == "step":
            engine.backward(engine(*CASE.batches(1)[0]))
        with pytest.raises(StateError, match=rf"{name}.*gathered"):
            edit_and_go_on(engine, name, then)
        engine.optimizer.zero_grad()
        seen = Trained()
        for step in range(1, CASE.num_steps):
            engine_step(engine, CASE, step, seen)
        found = collect_engine(engine, seen)
    assert all(same_bits(found.masters[key], expected.masters[key]) for key in expected.masters)


@pytest.mark.parametrize("threshold", [0, 100, 10**9])
def test_a_conversion_of_the_model_is_refused_and_changes_no_weight(threshold, tmp_path):
    with CASE.engine(tmp_path, param_persistence_threshold=threshold) as engine:
        one_step(engine)
        before = {name: t.clone() for name, t in engine.module.state_dict().items()}
        with pytest.raises(StateError, match=r"^to on parameter|converted with to\(\)"):
            convert_and_run(engine)
        after = engine.module.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def convert_and_run(engine) -> None:
    engine.module.to(torch.float64)
    engine(*CASE.batches(1)[0])


@pytest.mark.parametrize("threshold", [0, 100, 10**9])
def test_a_gradient_with_a_graph_is_refused_not_dropped(threshold, tmp_path):
    with CASE.engine(tmp_path, param_persistence_threshold=threshold) as engine:
        with pytest.raises(StateError, match="create_graph"):
            engine(*CASE.batches(0)[0]).backward(create_graph=True)
        engine.optimizer.zero_grad()
        one_step(engine)


def test_a_step_inside_gathered_is_refused(tmp_path):
    with CASE.engine(tmp_path) as engine:
        one_step(engine)
        with engine.gathered(engine.module.head):
            engine.backward(engine(*CASE.batches(1)[0]))
            with pytest.raises(StateError, match="gathered"):
                engine.step()
        engine.step()
        one_step(engine, 2)


def test_a_parametrization_read_outside_of_forward_is_refused_or_gathered(tmp_path):
    case = Case(kind=zoo.Parametrized, dtype=FP32)
    with case.engine(tmp_path) as engine:
        layer = engine.module.blocks[0].up
        with pytest.raises(StateError, match=r"parametrizations\.weight\.original"):
            _ = layer.weight
        with engine.gathered(layer):
            assert torch.equal(layer.weight, case.model().blocks[0].up.weight)
