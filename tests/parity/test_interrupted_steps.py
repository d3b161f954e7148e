"""Ctrl-C at the places of a step where half of what belongs together could be left."""

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


@pytest.mark.parametrize("goes_on", ["again", "anew"])
@pytest.mark.parametrize("place", ["disk", "host"])
def test_a_step_that_was_decided_and_not_submitted_can_be_taken_again(
    place, goes_on, tmp_path, monkeypatch
):
    settings = {**ROOM, "placement": place, "overlap": "speculate"}
    with CASE.engine(tmp_path, **settings) as engine:
        speculator = engine._parts.speculator
        settle = speculator.settle

        def interrupted(rows, *, clipped: bool) -> None:
            settle(rows, clipped=clipped)
            signal.raise_signal(signal.SIGINT)

        for step in range(CASE.num_steps):
            if step == 2:
                engine.backward(engine(*CASE.batches(step)[0]))
                with monkeypatch.context() as patch:
                    patch.setattr(speculator, "settle", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        engine.step()
                assert engine.global_step == 2
                assert engine._parts.ground.ledger.generation == 2
                if goes_on == "again":
                    engine.step()
                    assert speculator.history.kept_elems > 0
                    continue
                engine.optimizer.zero_grad()
            engine_step(engine, CASE, step, Trained())
        assert_as_in_memory(engine)


@pytest.mark.parametrize("place", ["disk", "host"])
def test_a_step_that_cannot_be_submitted_leaves_what_was_made_ahead(place, tmp_path, monkeypatch):
    settings = {**ROOM, "placement": place, "overlap": "speculate", "gradient_clipping": 0.0}
    with CASE.engine(tmp_path, **settings) as engine:
        parts = engine._parts

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError("no room")

        for step in range(CASE.num_steps):
            if step == 2:
                engine.backward(engine(*CASE.batches(step)[0]))
                next(iter(parts.speculator._bets.values())).rows.clear()  # one is made again
                with monkeypatch.context() as patch:
                    patch.setattr(parts.stepper._builder, "submit", refuse)
                    with pytest.raises(OSError, match="no room"):
                        engine.step()
                assert parts.ground.ledger.generation == 2
                engine.step()
                continue
            engine_step(engine, CASE, step, Trained())
        assert_as_in_memory(engine)
