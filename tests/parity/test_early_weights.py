"""A forward waits for weights that are made, not for what is still on its way to the drive."""

from __future__ import annotations

import threading

import pytest
from case import Case, Trained, assert_same, collect_engine, engine_step, train_in_memory

from aio.faults import Faults


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("threshold", [0, 1000], ids=["units", "and small tensors"])
def test_the_next_forward_begins_while_the_step_is_being_written(
    threshold, overlap, tmp_path
) -> None:
    case = Case(num_steps=4, clipping=1e6)
    settings = {
        "overlap": overlap, "placement": "host", "param_persistence_threshold": threshold,
        "chunk_elems": 65536, "host_memory": "64MiB",  # slots for all that is being written
    }  # fmt: skip
    trained = Trained()
    with case.engine(tmp_path, aio_backend="faults", **settings) as engine:
        faults = Faults(engine._parts.ground.queue)
        engine_step(engine, case, 0, trained)
        loss = engine(*case.batches(1)[0])
        engine._parts.ground.ledger.finish()
        faults.allow(0)  # nothing of the next step reaches the drive

        def go_on() -> None:
            engine.backward(loss)
            engine.step()
            trained.losses.append(loss.item())
            trained.norms.append(engine.grad_norm)
            losses.append(engine(*case.batches(2)[0]))

        losses: list = []
        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        thread.join(60)
        early = not thread.is_alive()
        assert not engine._parts.ground.ledger._pending.jobs[0].done()
        faults.allow()
        thread.join()
        assert early, "the forward waited for the drive"
        engine.backward(losses[0])
        engine.step()
        trained.losses.append(losses[0].item())
        trained.norms.append(engine.grad_norm)
        engine_step(engine, case, 3, trained)
        assert_same(collect_engine(engine, trained), train_in_memory(case))
