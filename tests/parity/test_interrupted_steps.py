"""Ctrl-C at the two places of a step where half of what belongs together could be left."""

from __future__ import annotations

import signal

import pytest
from case import Case, Trained, assert_same, collect_engine, engine_step, train_in_memory

CASE = Case(num_steps=4)
ROOM = {"host_memory": "64MiB", "device_memory": "64MiB"}
PLACES = {
    "moves": {},
    "kept": {"placement": {"weights": "device", "state": "disk"}, **ROOM},
    "small": {"param_persistence_threshold": 10**6, **ROOM},
    "memory": {"placement": "auto", "durability": "none", **ROOM},
}


def assert_as_in_memory(engine) -> None:
    whole = train_in_memory(CASE)
    expected = Trained([], [], [], whole.masters, whole.exp_avgs, whole.exp_avg_sqs)
    assert_same(collect_engine(engine, Trained()), expected)


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_was_submitted_counts_whole(place, tmp_path, monkeypatch):
    with CASE.engine(tmp_path, **PLACES[place]) as engine:
        ledger = engine._parts.ground.ledger
        submit = ledger.submit

        def interrupted(pending) -> None:
            submit(pending)
            signal.raise_signal(signal.SIGINT)

        for step in range(CASE.num_steps):
            if step != 2:
                engine_step(engine, CASE, step, Trained())
                continue
            with monkeypatch.context() as patch:
                patch.setattr(ledger, "submit", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine_step(engine, CASE, step, Trained())
            assert engine._micro_steps == 0
            assert not engine._parts.lent.has_gradients
            with engine.gathered():
                pass  # weights of the generation before would be taken for edits
            assert ledger.generation == step + 1
        assert_as_in_memory(engine)


@pytest.mark.parametrize("place", ["disk", "host"])
def test_an_update_made_ahead_is_dropped_whole(place, tmp_path, monkeypatch):
    settings = {**ROOM, "placement": place, "overlap": "speculate"}
    with CASE.engine(tmp_path, **settings) as engine:
        for step in range(CASE.num_steps):
            if step == 2:
                engine.backward(engine(*CASE.batches(50)[0]))
                bet = next(iter(engine._parts.speculator._bets.values()))
                bet.job.wait()

                def interrupted() -> None:
                    raise KeyboardInterrupt

                monkeypatch.setattr(bet.job, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.optimizer.zero_grad()
                assert bet.job.closed
                engine.optimizer.zero_grad()
            engine_step(engine, CASE, step, Trained())
        assert_as_in_memory(engine)
