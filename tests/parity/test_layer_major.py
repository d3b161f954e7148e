"""All micro-batches of a step, unit by unit: the same bits as one after another."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import models
import pytest
import torch
import torch.nn.functional as F
from case import Case, Trained, assert_same, collect_engine, train_in_memory
from torch.utils.checkpoint import checkpoint

from offload import OffloadEngine
from offload.errors import ConfigError, StateError
from offload.runtime import random_state
from offload.runtime.layer_major import Leaves

CASE = Case(accumulation=4, clipping=0.5, num_steps=4)


def train(engine, case: Case, order: str) -> Trained:
    trained = Trained()
    for step in range(case.num_steps):
        losses = engine.train_batch(case.batches(step), order=order)
        trained.losses += [loss.item() for loss in losses]
        trained.norms.append(engine.grad_norm)
    return collect_engine(engine, trained)


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize("order", ["horizontal", "layer"])
def test_either_order_equals_memory(order, threshold, overlap, tmp_path):
    settings = {"overlap": overlap, "param_persistence_threshold": threshold}
    with CASE.engine(tmp_path, **settings) as engine:
        assert_same(train(engine, CASE, order), train_in_memory(CASE))


class Dropping(models.Decoder):
    """Blocks with dropout, recomputed in backward."""

    def run_block(self, block, x):
        if not self.training:
            return block(x)
        return checkpoint(lambda x: F.dropout(block(x), 0.2), x, use_reentrant=False)


def engine_of(folder, num_micro_steps, **settings) -> OffloadEngine:
    model = models.build(Dropping, num_blocks=4)
    defaults = {
        "gradient_accumulation_steps": num_micro_steps,
        "overlap": "speculate",
        "host_memory": "16MiB", "device_memory": "8MiB", "placement": "disk", "lr": 1e-2,
        "param_persistence_threshold": 0, "chunk_elems": 4096,
    }  # fmt: skip
    return OffloadEngine(model, nvme_path=folder, **defaults | settings)


def run(folder, order: str, num_micro_steps: int, **settings):
    folder.mkdir()
    torch.manual_seed(5)
    with engine_of(folder, num_micro_steps, **settings) as engine:
        losses = []
        for step in range(3):
            batches = [models.batch(8 * step + i) for i in range(num_micro_steps)]
            losses += [loss.item() for loss in engine.train_batch(batches, order=order)]
        engine.full_fp32_param("head.weight")
        moved = engine.metrics.total_read_bytes, engine.metrics.total_write_bytes
        names = [name for name, _ in engine.module.named_parameters()]
        return losses, {name: engine.full_fp32_param(name) for name in names}, moved


def test_dropout_draws_the_same_numbers_in_either_order(tmp_path):
    first = run(tmp_path / "h", "horizontal", 4)
    second = run(tmp_path / "l", "layer", 4)
    assert first[0] == second[0]
    assert len(set(first[0])) == len(first[0])
    for name, value in first[1].items():
        assert torch.equal(value, second[1][name]), name


def test_weights_move_once_a_step_whatever_the_number_of_micro_steps(tmp_path):
    held = {"overlap": "hold"}  # what is lent to updates ahead of step() depends on time
    one = run(tmp_path / "1", "horizontal", 1, **held)[2]
    eight = run(tmp_path / "8", "layer", 8, **held)[2]
    many = run(tmp_path / "h8", "horizontal", 8, **held)[2]
    assert eight[1] == one[1]
    assert eight[0] <= 1.03 * one[0]
    assert many[0] > 2 * eight[0]


@pytest.mark.parametrize(
    "kind", [models.Decoder, models.RepeatedBlock, models.Branching], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"checkpointing": "nonreentrant"}])
def test_awkward_models_equal_memory(kind, options, tmp_path):
    case = Case(kind=kind, options=tuple(options.items()), accumulation=3, num_steps=3)
    with case.engine(tmp_path) as engine:
        assert_same(train(engine, case, "layer"), train_in_memory(case))


def test_an_error_in_one_micro_batch_is_told_and_training_goes_on(tmp_path):
    with CASE.engine(tmp_path) as engine:
        trained = Trained()
        for step in range(CASE.num_steps):
            if step == 2:
                bad = CASE.batches(50)
                bad[1] = (bad[1][0], bad[1][1] + 10**6)
                with pytest.raises((IndexError, RuntimeError)):
                    engine.train_batch(bad, order="layer")
                engine.optimizer.zero_grad()
            losses = engine.train_batch(CASE.batches(step), order="layer")
            trained.losses += [loss.item() for loss in losses]
            trained.norms.append(engine.grad_norm)
        names = dict(engine.module.named_parameters())
        assert all(isinstance(p, torch.nn.Parameter) for p in names.values())
        assert_same(collect_engine(engine, trained), train_in_memory(CASE))


def test_a_weight_used_outside_its_module_is_refused_by_name(tmp_path):
    case = Case(kind=models.OutsideWeight, accumulation=3, num_steps=2)
    with case.engine(tmp_path) as engine:
        with pytest.raises(StateError, match=r"expected '\S+' to be used in its module's forward"):
            engine.train_batch(case.batches(0), order="layer")
        engine.optimizer.zero_grad()
        assert_same(train(engine, case, "horizontal"), train_in_memory(case))


def test_what_does_not_fit_the_settings_is_refused(tmp_path):
    with CASE.engine(tmp_path) as engine:
        with pytest.raises(ConfigError, match="expected 4 batches"):
            engine.train_batch(CASE.batches(0)[:2])
        with pytest.raises(ConfigError, match="expected order horizontal or layer"):
            engine.train_batch(CASE.batches(0), order="diagonal")
        with pytest.raises(ConfigError, match="Pass loss_fn"):
            engine.train_batch(CASE.batches(0), loss_fn=lambda loss: [loss])


OTHER = torch.Generator()  # stands for that of a GPU


class DrawingElsewhere(models.Decoder):
    """Blocks that draw from a device's generator too."""

    def run_block(self, block, x):
        found = block(F.dropout(x, 0.1, self.training))
        return found * (torch.rand(found.shape, generator=OTHER) > 0.2)


def test_a_devices_random_numbers_are_of_the_micro_batch_in_either_order(tmp_path, monkeypatch):
    monkeypatch.setattr(random_state, "generators", lambda: [torch.default_generator, OTHER])
    found = []
    for order in ("horizontal", "layer"):
        torch.manual_seed(3)
        OTHER.manual_seed(4)
        (tmp_path / order).mkdir()
        with OffloadEngine(
            models.build(DrawingElsewhere), nvme_path=tmp_path / order, lr=1e-2, order=order,
            gradient_accumulation_steps=3, param_persistence_threshold=0,
        ) as engine:  # fmt: skip
            losses = [
                loss.item()
                for step in range(3)
                for loss in engine.train_batch([models.batch(3 * step + i) for i in range(3)])
            ]
            masters = [engine.full_fp32_param(name) for name, _ in engine.module.named_parameters()]
        found.append((losses, masters, OTHER.get_state()))
    assert found[0][0] == found[1][0]
    assert len(set(found[0][0])) == 9
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert torch.equal(found[0][2], torch.Generator().manual_seed(4).get_state())


def test_every_thread_gives_work_to_the_stream_of_the_caller(tmp_path, monkeypatch):
    given = []

    @contextlib.contextmanager
    def stream(of):
        given.append((of, threading.get_ident()))
        yield

    with CASE.engine(tmp_path) as engine:
        train(engine, dataclasses.replace(CASE, num_steps=1), "layer")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
        monkeypatch.setattr(torch.cuda, "stream", stream)
        engine.train_batch(CASE.batches(1), order="layer")
    assert [of for of, _ in given] == ["the caller's"] * 4
    assert len({thread for _, thread in given} - {threading.get_ident()}) == 4


def test_a_leaf_that_is_empty_stays_on_its_device():
    model = torch.nn.Linear(4, 4, device="meta")
    unit = SimpleNamespace(parameters=list(model.parameters()))
    leaves = Leaves(model, [unit], 2)
    leaves.put(0, unit)
    leaves.take_out(unit)
    assert {leaf.device.type for leaf in leaves.of(0, unit)} == {"meta"}
