"""Loops that are not three lines: shorter windows, interruptions, evaluation, a loss scaler."""

from __future__ import annotations

import signal

import pytest
import torch
from case import (
    Case,
    Trained,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    oracle_step,
)

from offload.errors import StateError

CASE = Case()


@pytest.fixture(params=["hold", "speculate"])
def overlap(request):
    return request.param


def assert_equal_now(engine, oracle) -> None:
    assert_same(collect_engine(engine, Trained()), collect_oracle(oracle, Trained()))


def train_both(engine, oracle, case: Case, steps: range) -> None:
    for step in steps:
        engine_step(engine, case, step, Trained())
        oracle_step(oracle, case, step, Trained())
    assert_equal_now(engine, oracle)


def test_the_last_window_of_an_accumulation_may_be_shorter(overlap, tmp_path):
    """Ten batches in windows of four: the last step sees two, each divided by four."""
    case = Case(accumulation=4, clipping=0.5)
    oracle = case.oracle()
    with case.engine(tmp_path, overlap=overlap) as engine:
        for _ in range(2):
            batches = [batch for step in range(3) for batch in case.batches(step)][:10]
            for index, batch in enumerate(batches):
                engine.backward(engine(*batch))
                (oracle.model(*batch) / 4).backward()
                oracle.keep_gradients()
                if (index + 1) % 4 == 0:
                    engine.step()
                    oracle.step()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            oracle.step()
        assert engine.global_step == 6
        assert_equal_now(engine, oracle)
        train_both(engine, oracle, case, range(3, 5))


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


def fail(*_):
    raise ValueError("mine")


@pytest.mark.parametrize("where", ["forward", "after-forward", "backward", "gradient"])
@pytest.mark.parametrize(
    ("happens", "raised"),
    [(interrupt, KeyboardInterrupt), (fail, ValueError)],
    ids=["ctrl-c", "error"],
)
def test_training_goes_on_after_an_interruption(happens, raised, where, overlap, tmp_path):
    """The interrupted step is dropped; those that follow are right."""
    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap, param_persistence_threshold=100) as engine:
        train_both(engine, oracle, CASE, range(1))
        block = engine.module.blocks[1]
        register = {
            "forward": block.register_forward_pre_hook,
            "after-forward": block.register_forward_hook,
            "backward": block.register_full_backward_hook,
            "gradient": block.up.weight.register_post_accumulate_grad_hook,
        }[where]
        handle = register(happens)
        with pytest.raises(raised):
            engine.backward(engine(*CASE.batches(50)[0]))
        handle.remove()
        engine.optimizer.zero_grad()
        train_both(engine, oracle, CASE, range(1, 3))


def test_what_an_interrupted_backward_gave_counts_if_it_is_not_dropped(overlap, tmp_path):
    """As in torch: gradients of the units that backward had reached are there, and add up."""
    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        for model in (engine.module, oracle.model):
            handle = model.blocks[1].register_full_backward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(*CASE.batches(50)[0]).backward()
            handle.remove()
        oracle.keep_gradients()
        (batch,) = CASE.batches(51)
        engine(*batch).backward()
        oracle.model(*batch).backward()
        oracle.keep_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        oracle.step()
        assert_equal_now(engine, oracle)
        train_both(engine, oracle, CASE, range(2))


def test_evaluation_in_the_middle_of_an_accumulation_changes_nothing(overlap, tmp_path):
    case = Case(accumulation=3)
    oracle = case.oracle()
    probe = case.batches(90)[0]
    with case.engine(tmp_path, overlap=overlap) as engine:
        for step in range(3):
            for batch in case.batches(step):
                engine.backward(engine(*batch))
                (oracle.model(*batch) / 3).backward()
                oracle.keep_gradients()
                engine.eval()
                with torch.no_grad():
                    assert engine(*probe).item() == oracle.model(*probe).item()
                engine.train()
            engine.step()
            oracle.step()
        assert_equal_now(engine, oracle)


def test_a_grad_scaler_is_told_that_the_engine_scales(tmp_path):
    oracle = CASE.oracle()
    with CASE.engine(tmp_path) as engine:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        (batch,) = CASE.batches(0)
        scaler.scale(engine(*batch)).backward()
        with pytest.raises(StateError, match=r"GradScaler.*enabled=False"):
            scaler.step(engine.optimizer)
        engine.optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(3):
            scaler.scale(engine(*CASE.batches(step)[0])).backward()
            scaler.unscale_(engine.optimizer)
            scaler.step(engine.optimizer)
            scaler.update()
            engine.optimizer.zero_grad()
            oracle_step(oracle, CASE, step, Trained())
        assert_equal_now(engine, oracle)
