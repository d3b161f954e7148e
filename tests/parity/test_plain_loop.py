"""The loop that everybody has: a torch optimizer, a torch scheduler, `loss.backward()`."""

import dataclasses

import pytest
import torch
from case import Case, Trained, assert_same, collect_engine, collect_oracle

CASE = Case()


def schedulers(optimizer):
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        milestones=[2],
    )


def test_a_plain_loop_with_a_torch_scheduler_equals_memory(tmp_path):
    oracle, ours, theirs = CASE.oracle(), Trained(), Trained()
    rates = []
    with CASE.engine(tmp_path) as engine:
        optimizer = engine.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = schedulers(optimizer)
        for step in range(6):
            (batch,) = CASE.batches(step)
            (group,) = oracle.groups
            oracle.groups = (dataclasses.replace(group, lr=optimizer.param_groups[0]["lr"]),)
            rates.append(oracle.groups[0].lr)
            loss = engine(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ours.losses.append(loss.item())
            loss = oracle.model(*batch)
            loss.backward()
            oracle.keep_gradients()
            oracle.step()
            theirs.losses.append(loss.item())
        assert len(set(rates)) >= 5
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


@pytest.mark.parametrize("announced", [1, 2])
def test_two_plain_backwards_before_a_step_add_up(announced, tmp_path):
    """`loss.backward()` divides nothing, and every contribution is rounded once."""
    oracle, ours, theirs = CASE.oracle(), Trained(), Trained()
    with CASE.engine(tmp_path, gradient_accumulation_steps=announced) as engine:
        for step in range(3):
            for batch in (CASE.batches(2 * step)[0], CASE.batches(2 * step + 1)[0]):
                loss = engine(*batch)
                loss.backward()
                ours.losses.append(loss.item())
                loss = oracle.model(*batch)
                loss.backward()
                oracle.keep_gradients()
                theirs.losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            oracle.step()
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("at", ["before", "after"])
def test_a_rate_changed_by_hand_counts_from_the_next_step(at, overlap, tmp_path):
    """Hyper-parameters are those at `step()`, even when they change after the backward (N5)."""
    oracle, ours, theirs = CASE.oracle(), Trained(), Trained()
    with CASE.engine(tmp_path, overlap=overlap) as engine:
        for step in range(4):
            (batch,) = CASE.batches(step)
            rate = 1e-2 / (step + 1)
            if at == "before":
                engine.optimizer.param_groups[0]["lr"] = rate
            loss = engine(*batch)
            loss.backward()
            engine.optimizer.param_groups[0]["lr"] = rate
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            ours.losses.append(loss.item())
            oracle.groups = (dataclasses.replace(oracle.groups[0], lr=rate),)
            loss = oracle.model(*batch)
            loss.backward()
            oracle.keep_gradients()
            oracle.step()
            theirs.losses.append(loss.item())
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))
