"""Errors, several graphs at once, edits: what leaves the straight path ends on the same numbers."""

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

CASE = Case()


@pytest.fixture(params=["hold", "speculate"])
def overlap(request):
    return request.param


def train_both(engine, oracle, steps: range) -> None:
    """Train on and compare everything."""
    ours, theirs = Trained(), Trained()
    for step in steps:
        engine_step(engine, CASE, step, ours)
        oracle_step(oracle, CASE, step, theirs)
    assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


def test_an_exception_in_forward_changes_nothing(overlap, tmp_path):
    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        train_both(engine, oracle, range(1))
        tokens, labels = CASE.batches(50)[0]
        with pytest.raises((IndexError, RuntimeError)):
            engine(tokens, labels + 10**6)
        train_both(engine, oracle, range(1, 3))


def test_an_exception_in_backward_leaves_a_step_that_can_be_dropped(overlap, tmp_path):
    def refuse(*_):
        raise ValueError("mine")

    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        train_both(engine, oracle, range(1))
        hook = engine.module.blocks[1].register_full_backward_hook(refuse)
        with pytest.raises(ValueError, match="mine"):
            engine.backward(engine(*CASE.batches(50)[0]))
        hook.remove()
        engine.optimizer.zero_grad()
        train_both(engine, oracle, range(1, 3))


def test_a_forward_without_a_backward_is_forgotten(overlap, tmp_path):
    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        train_both(engine, oracle, range(1))
        unused = engine(*CASE.batches(50)[0])
        train_both(engine, oracle, range(1, 3))
        del unused
        train_both(engine, oracle, range(3, 4))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
def test_two_graphs_may_live_before_either_backward(order, overlap, tmp_path):
    oracle = CASE.oracle()
    batches = [CASE.batches(50)[0], CASE.batches(51)[0]]
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        ours = [engine(*batch) for batch in batches]
        theirs = [oracle.model(*batch) for batch in batches]
        for index in order:
            ours[index].backward()
            theirs[index].backward()
            oracle.keep_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        oracle.step()
        train_both(engine, oracle, range(2))


def test_a_graph_may_be_walked_twice(overlap, tmp_path):
    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        for model in (engine, oracle.model):
            loss = model(*CASE.batches(50)[0])
            for keep in (True, False):
                loss.backward(retain_graph=keep)
                if model is oracle.model:
                    oracle.keep_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        oracle.step()
        train_both(engine, oracle, range(2))


def test_an_edit_of_gathered_weights_replaces_the_master(overlap, tmp_path):
    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        train_both(engine, oracle, range(2))
        param = engine.module.blocks[1].up.weight
        with engine.gathered(param), torch.no_grad():
            param.zero_()
        assert not engine.full_fp32_param(param).any()
        state = oracle.states["blocks.1.up.weight"]
        state.hi.zero_()
        state.lo.zero_()
        oracle.model.blocks[1].up.weight.data.zero_()
        train_both(engine, oracle, range(2, 4))


def test_gathered_weights_are_those_that_compute(overlap, tmp_path):
    oracle = CASE.oracle()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        train_both(engine, oracle, range(1))
        with engine.gathered(), torch.no_grad():
            for name, param in oracle.model.named_parameters():
                assert torch.equal(engine.module.get_parameter(name), param), name
        train_both(engine, oracle, range(1, 2))


def test_functional_call_computes_with_what_it_is_given(tmp_path):
    given = {name: value + 0.01 for name, value in CASE.model().state_dict().items()}
    plain = CASE.model()
    plain.load_state_dict(given)
    (batch,) = CASE.batches(0)
    with CASE.engine(tmp_path) as engine:
        with torch.no_grad():
            seen = torch.func.functional_call(engine.module, given, batch)
            assert torch.equal(seen, plain(*batch))
        train_both(engine, CASE.oracle(), range(1))
