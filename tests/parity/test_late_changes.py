"""What a loop may do between a backward and its step: equal to memory, wherever things are."""

import dataclasses

import pytest
from case import Case, Trained, assert_same, collect_engine, collect_oracle

CASE = Case(clipping=0.5)
PLACES = ["disk", "host", "device"]
# One letter an event: B backward, S step and zero_grad, Z zero_grad, R another learning rate.
LOOPS = {
    "the rate changes between backward and step": "BRS BS BRS BRS",
    "a step is left out, so gradients add up": "BS B BS BS BBS",
    "two backwards before each step": "BBS BBS BBS",
    "gradients are dropped between": "BZBS BS BBZBS ZBS",
    "all of it": "BRS B BRS BZBS BBRS RBS BZ BS",
}


@pytest.mark.parametrize("overlap", ["hold", "speculate", "auto"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_a_loop_equals_memory(loop, place, overlap, tmp_path):
    oracle, ours, theirs = CASE.oracle(), Trained(), Trained()
    rate, number = 1e-2, 0
    with CASE.engine(tmp_path, placement=place, overlap=overlap) as engine:
        optimizer = engine.optimizer
        for event in loop.replace(" ", ""):
            if event == "B":
                (batch,) = CASE.batches(number)
                number += 1
                loss, true = engine(*batch), oracle.model(*batch)
                loss.backward()
                true.backward()
                oracle.keep_gradients()
                ours.losses.append(loss.item())
                theirs.losses.append(true.item())
            elif event == "R":
                rate *= 0.7
                optimizer.param_groups[0]["lr"] = rate
                oracle.groups = (dataclasses.replace(oracle.groups[0], lr=rate),)
            elif event == "S":
                optimizer.step()
                optimizer.zero_grad()
                oracle.step()
                ours.norms.append(engine.grad_norm)
                theirs.norms.append(oracle.grad_norm)
            else:
                optimizer.zero_grad()
                oracle.drop_gradients()
        assert len(ours.norms) >= 3
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))
