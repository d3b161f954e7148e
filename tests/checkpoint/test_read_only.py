"""A second engine evaluates what a store or a checkpoint holds, beside the job that owns it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import models
import pytest
import torch
from checkpoint_run import SMALL, Noisy, Run, as_bytes, running

from offload import OffloadEngine
from offload.errors import ConfigError, StateError, StoreError


@contextlib.contextmanager
def reading(path: Path, **settings: object) -> Iterator[OffloadEngine]:
    settings = {**SMALL, "nvme_path": path, "read_only": True, **settings}
    with OffloadEngine(models.build(Noisy, seed=9), **settings) as engine:
        yield engine.eval()


def evaluate(engine: OffloadEngine) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(*models.batch(77)))
    engine.train()
    return loss


def masters(engine: OffloadEngine) -> dict[str, bytes]:
    parameters = engine.module.named_parameters()
    return {name: as_bytes(engine.full_fp32_param(p)) for name, p in parameters}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_living_store_is_evaluated_and_nothing_in_it_changes(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(3)
        expected, weights = evaluate(run.engine), masters(run.engine)
        before = content(run.store_folder)
        with reading(tmp_path / "store", host_memory="2MiB") as reader:
            assert reader.global_step == 3
            assert evaluate(reader) == expected
            assert masters(reader) == weights
            state = reader.module.state_dict()
            assert set(state) == set(run.engine.module.state_dict())
            assert content(run.store_folder) == before
        assert content(run.store_folder) == before
        run.steps(1)


def test_a_reader_notices_that_the_owner_went_on(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(3)
        expected = evaluate(run.engine)
        masters(run.engine)  # waits until the third step is committed
        with reading(tmp_path / "store") as reader:
            assert evaluate(reader) == expected
            run.steps(1)
            assert evaluate(reader) == expected  # one step ahead: the old side is whole
            run.steps(2)
            for call in (
                lambda: evaluate(reader), lambda: masters(reader), reader.module.state_dict,
                lambda: reader.export(tmp_path / "out"),
            ):  # fmt: skip
                with pytest.raises(StoreError, match=r"generation 3 is no longer there.*Open it"):
                    call()
        expected = evaluate(run.engine)
    with reading(tmp_path / "store") as reader:
        assert reader.global_step == 6
        assert evaluate(reader) == expected


def test_a_checkpoint_is_evaluated_where_it_lies_while_training_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(2)
        expected, weights = evaluate(run.engine), masters(run.engine)
        folder = run.engine.save_checkpoint(tmp_path / "ck", "x", {"n": 1}).wait()
        before = content(folder)
        with reading(folder, chunk_elems=2048) as reader:
            run.steps(4)
            assert reader.global_step == 2
            assert evaluate(reader) == expected
            assert masters(reader) == weights
        assert content(folder) == before


def test_a_reader_does_not_train_save_load_or_edit(tmp_path: Path) -> None:
    with running(tmp_path / "store") as run:
        run.steps(1)
    with reading(tmp_path / "store") as reader:
        loss = reader.train()(*models.batch(0))
        assert not loss.requires_grad
        for call in (
            lambda: reader.backward(loss), reader.optimizer.step,
            lambda: reader.save_checkpoint(tmp_path / "ck"),
            lambda: reader.load_checkpoint(tmp_path / "ck"),
        ):  # fmt: skip
            with pytest.raises(StateError, match="read_only=True"):
                call()
        parameter = reader.module.embed.weight
        with (
            pytest.raises(StoreError, match="opened read-only"), reader.gathered(parameter),
            torch.no_grad(),
        ):  # fmt: skip
            parameter.mul_(2.0)
    assert not (tmp_path / "ck").exists()


def test_another_model_or_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreError, match="got none"), reading(tmp_path / "store"):
        pass
    other = partial(models.Decoder, width=32)
    with running(tmp_path / "store", name="mine", model=other) as run:
        run.steps(1)
        with (
            pytest.raises(StoreError, match="another model or other settings"),
            reading(tmp_path / "store", name="mine"),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="read_only"),
        reading(tmp_path / "store", resume=False),
    ):
        pass
    assert os.listdir(tmp_path / "store") == ["offload-mine"]


def test_two_engines_in_one_process_each_have_their_own_store(tmp_path: Path) -> None:
    with running(tmp_path / "store", name="one") as one:
        with pytest.raises(StoreError, match=r"in use by this process .* another engine"):
            Run(tmp_path / "store", name="one", resume=True)
        with running(tmp_path / "store", name="two") as two:
            one.steps(1)
            two.steps(1)
