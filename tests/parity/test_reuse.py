"""Units that stay for their next use, and others that are fetched further ahead: the same bits."""

import dataclasses

import models
import pytest
from case import Case, Trained, assert_same, engine_step, train_in_memory, train_offloaded

KINDS = {
    "plain": Case(clipping=0.5),
    "repeated": Case(kind=models.RepeatedBlock),
    "outside": Case(kind=models.OutsideWeight),
    "branching": Case(kind=models.Branching),
    "unused": Case(kind=models.UnusedParts),
    "attention": Case(kind=models.TorchAttention),
    "frozen": Case(frozen=("blocks.1.", "embed")),
    "tied": Case(options=(("tied", True),), accumulation=2),
    "reentrant": Case(options=(("checkpointing", "reentrant"),)),
    "nonreentrant": Case(options=(("checkpointing", "nonreentrant"),), clipping=0.5),
}


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("distance", [30_000, 10**9])
def test_units_that_stay_change_no_number(case, distance, tmp_path):
    with case.engine(tmp_path, max_reuse_distance=distance, overlap="speculate") as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("elems", [0, 1, 10**9])
def test_what_is_fetched_ahead_changes_no_number(elems, tmp_path):
    case = KINDS["plain"]
    with case.engine(tmp_path, prefetch_bucket_size=elems) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


def test_evaluation_and_a_forward_without_backward_leave_what_stays_right(tmp_path):
    case = dataclasses.replace(KINDS["plain"], num_steps=4)
    ours = Trained()
    with case.engine(tmp_path, max_reuse_distance=10**9) as engine:
        for step in range(case.num_steps):
            engine(*case.batches(step)[0])  # its units stay for a backward that never comes
            engine.eval()
            engine(*case.batches(step)[0])
            engine.train()
            engine_step(engine, case, step, ours)
            with engine.gathered():
                pass
    assert ours.losses == train_in_memory(case).losses
    assert ours.norms == train_in_memory(case).norms
