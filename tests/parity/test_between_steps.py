"""What happens between a backward and its step, and between steps: readers see one generation."""

import math

import pytest
import torch
from case import (
    BF16,
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    oracle_step,
    same_bits,
)

CASE = Case(accumulation=2, clipping=0.5)


@pytest.fixture(params=["hold", "speculate"])
def overlap(request):
    """Whether the next generation may exist before `step()`: nobody may see a difference."""
    return request.param


def evaluate(model, batch) -> float:
    """One loss of an engine or a model, in evaluation mode and without gradients."""
    model.eval()
    with torch.no_grad():
        loss = model(*batch).item()
    model.train()
    return loss


def test_evaluation_between_backward_and_step_sees_the_weights_before_the_step(overlap, tmp_path):
    oracle, ours, theirs = CASE.oracle(), Trained(), Trained()
    probe = CASE.batches(90)[0]
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        for step in range(4):
            expected = evaluate(oracle.model, probe)
            oracle_step(oracle, CASE, step, theirs)
            for batch in CASE.batches(step):
                loss = engine(*batch)
                engine.backward(loss)
                assert evaluate(engine, probe) == expected
                engine.step()
                ours.losses.append(loss.item())
            ours.norms.append(engine.grad_norm)
            assert evaluate(engine, probe) == evaluate(oracle.model, probe) != expected
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


def test_state_dict_between_backward_and_step_is_the_generation_before(overlap, tmp_path):
    case = Case()
    oracle = case.oracle()
    with case.engine(tmp_path, overlap=overlap) as engine:
        for step in range(3):
            before = {name: value.clone() for name, value in oracle.model.state_dict().items()}
            oracle_step(oracle, case, step, Trained())
            engine.backward(engine(*case.batches(step)[0]))
            seen = engine.module.state_dict()
            assert all(torch.equal(seen[name].float(), before[name]) for name in before)
            engine.step()
            after = engine.module.state_dict()
            expected = oracle.model.state_dict()
            assert all(torch.equal(after[name].float(), expected[name]) for name in expected)
            assert any(not torch.equal(after[name], seen[name]) for name in seen)


def test_a_step_never_taken_is_discarded(overlap, tmp_path):
    case = Case()
    oracle, ours, theirs = case.oracle(), Trained(), Trained()
    with case.engine(tmp_path, overlap=overlap) as engine:
        for step in range(3):
            engine.backward(engine(*case.batches(50 + step)[0]))
            engine.optimizer.zero_grad()
            engine_step(engine, case, step, ours)
            oracle_step(oracle, case, step, theirs)
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


def test_backward_after_an_evaluation_of_another_model_part_is_undisturbed(overlap, tmp_path):
    oracle, ours, theirs = CASE.oracle(), Trained(), Trained()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        for step in range(3):
            engine_step(engine, CASE, step, ours)
            oracle_step(oracle, CASE, step, theirs)
            tokens, _ = CASE.batches(90 + step)[0]
            with torch.no_grad():
                seen = engine.module.hidden(tokens)
                assert torch.equal(seen, oracle.model.hidden(tokens))
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


@pytest.mark.parametrize(
    ("poison", "accumulation", "types"),
    [
        (math.inf, 1, (BF16, FP32)),
        (math.nan, 2, (BF16, FP32)),
        (math.nan, 1, (FP32, FP32)),
        (math.inf, 2, (FP32, FP32)),
    ],
)
def test_a_nonfinite_gradient_skips_the_step_and_changes_nothing(
    poison, accumulation, types, overlap, tmp_path
):
    case = Case(dtype=types[0], compute_dtype=types[1], accumulation=accumulation, clipping=0.5)
    oracle, ours, theirs = case.oracle(), Trained(), Trained()
    with case.engine(tmp_path, overlap=overlap) as engine:
        for step in range(4):
            if step == 2:
                before = collect_engine(engine, Trained())
                skip_a_step(engine, case, poison)
                assert_same(collect_engine(engine, Trained()), before)
                assert not math.isfinite(engine.grad_norm)
                assert engine.metrics.skipped_steps == 1
            engine_step(engine, case, step, ours)
            oracle_step(oracle, case, step, theirs)
        assert engine.metrics.skipped_steps == 1
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


def skip_a_step(engine, case: Case, poison: float) -> None:
    """The last micro-step's loss is poisoned: what came before it must be dropped too."""
    for index, batch in enumerate(case.batches(70)):
        last = index == case.accumulation - 1
        engine.backward(engine(*batch) * (poison if last else 1.0))
        engine.step()


def test_kept_gradients_are_those_of_memory(overlap, tmp_path):
    case = Case()
    oracle = case.oracle()
    (batch,) = case.batches(0)
    oracle.model(*batch).backward()
    oracle.keep_gradients()
    with case.engine(tmp_path, overlap=overlap) as engine:
        engine.backward(engine(*batch))
        for name, param in engine.module.named_parameters():
            kept = engine.kept_grad(param)
            assert kept.dtype is BF16
            assert same_bits(kept.float().flatten(), oracle.states[name].kept), name
