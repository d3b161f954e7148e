"""Passes of unusual shape: several models, gradients of inputs, decoding with a cache, parts."""

from __future__ import annotations

import dataclasses

import models
import pytest
import torch
import zoo
from case import (
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    train_in_memory,
    train_offloaded,
)
from models import Block, token_loss
from oracle import Oracle
from test_corners import smallest
from torch import Tensor, nn

from offload import OffloadEngine

CASE = Case(kind=zoo.Small, dtype=FP32, clipping=0.5)
PLACES = ["disk", "host"]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 40)
        self.blocks = nn.ModuleList(Block(40, 2) for _ in range(2))

    def forward(self, noise: Tensor) -> Tensor:
        x = self.first(noise)[:, None]
        for block in self.blocks:
            x = block(x)
        return x[:, 0]


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def update(trainee: object) -> None:
    if isinstance(trainee, Oracle):
        trainee.keep_gradients()
        trainee.step()
    else:
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()


def forget(trainee: object) -> None:
    if isinstance(trainee, Oracle):
        trainee.keep_gradients()
        trainee.drop_gradients()
    else:
        trainee.optimizer.zero_grad()


def alternate(maker: object, judge: object, num_steps: int) -> list[float]:
    """Train two models against each other; a trainee is an engine, or an oracle in memory."""
    make, score = (getattr(t, "model", t) for t in (maker, judge))
    losses = []
    for step in range(num_steps):
        numbers = torch.Generator().manual_seed(step)
        real, noise = (torch.randn(4, n, generator=numbers) for n in (40, 5))
        fake = make(noise)
        loss = nn.functional.softplus(-score(real)).mean()
        loss = loss + nn.functional.softplus(score(fake.detach())).mean()
        loss.backward()
        update(judge)
        forged = nn.functional.softplus(-score(fake)).mean()
        forged.backward()  # through both models; the judge's gradients are not wanted
        update(maker)
        forget(judge)
        losses += [loss.item(), forged.item()]
    return losses


@pytest.mark.parametrize("place", PLACES)
def test_two_engines_train_against_each_other_as_in_memory(place, tmp_path):
    cases = [dataclasses.replace(CASE, kind=kind, clipping=0.0) for kind in (Generator, Judge)]
    oracles = [case.oracle() for case in cases]
    expected = alternate(*oracles, num_steps=4)
    for name in ("maker", "judge"):
        (tmp_path / name).mkdir()
    with (
        cases[0].engine(tmp_path / "maker", placement=place) as maker,
        cases[1].engine(tmp_path / "judge", placement=place) as judge,
    ):
        assert alternate(maker, judge, num_steps=4) == expected
        for engine, oracle in zip((maker, judge), oracles, strict=True):
            ours, theirs = Trained(), Trained()
            assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


class Cached(zoo.Small):
    """Decodes token by token; each block gets what it has seen of its input before."""

    @torch.no_grad()
    def decode(self, tokens: Tensor, num_tokens: int) -> Tensor:
        seen: list[Tensor | None] = [None] * len(self.blocks)
        for _ in range(num_tokens):
            x = self.embed(tokens if seen[0] is None else tokens[:, -1:])
            for index, block in enumerate(self.blocks):
                past = seen[index]
                whole = x if past is None else torch.cat([past, x], 1)
                seen[index] = whole
                x = block(whole)[:, -x.shape[1] :]
            best = self.head(self.norm(x[:, -1:])).argmax(-1)
            tokens = torch.cat([tokens, best], 1)
        return tokens


@pytest.mark.parametrize("place", PLACES)
def test_decoding_with_a_cache_between_steps_is_that_of_memory(place, tmp_path):
    case = dataclasses.replace(CASE, kind=Cached)
    oracle, ours, theirs = case.oracle(), Trained(), Trained()
    with case.engine(tmp_path, placement=place) as engine:
        answers = set()
        for step in range(4):
            engine_step(engine, case, step, ours)
            oracle_step(oracle, case, step, theirs)
            prompt = case.batches(50)[0][0]
            found = engine.module.decode(prompt, 5)
            assert torch.equal(found, oracle.model.decode(prompt, 5))
            answers.add(tuple(found.flatten().tolist()))
        assert len(answers) > 1, "training must change the answers"
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


def oracle_step(oracle: Oracle, case: Case, step: int, trained: Trained) -> None:
    loss = oracle.model(*case.batches(step)[0])
    loss.backward()
    oracle.keep_gradients()
    oracle.step()
    trained.losses.append(loss.item())
    trained.norms.append(oracle.grad_norm)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_inputs_and_gathered_weights_are_those_of_memory(place, tmp_path):
    plain = CASE.model()
    tokens, labels = CASE.batches(0)[0]
    with CASE.engine(tmp_path, placement=place) as engine, engine.gathered():
        found = []
        for model in (engine.module, plain):
            x = torch.randn(2, 7, zoo.WIDTH, generator=torch.Generator().manual_seed(3))
            x.requires_grad_()
            loss = token_loss(model.head(model.blocks[1](model.blocks[0](x))), labels)
            weights = [*model.blocks[0].parameters(), model.head.weight]
            found.append(torch.autograd.grad(loss, [x, *weights]))
            found.append(torch.autograd.grad(model(tokens, labels), weights))
        for ours, theirs in zip(found[:2], found[2:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(param.grad is None for param in engine.module.parameters())


@pytest.mark.parametrize("budget", ["host_memory", "device_memory"])
def test_parts_called_without_the_model_train_in_the_smallest_memory(budget, tmp_path):
    case = dataclasses.replace(CASE, options=(("num_blocks", 5),), clipping=0.0)
    least = smallest(budget, case, tmp_path)
    oracle, ours, theirs = case.oracle(), Trained(), Trained()
    with case.engine(tmp_path, **{budget: least}) as engine:
        for step in range(3):
            tokens, labels = case.batches(step)[0]
            for model in (oracle.model, engine.module):
                x = model.embed(tokens)
                for block in model.blocks:
                    x = block(x)
                token_loss(model.head(x), labels).backward()
            update(oracle)
            update(engine)
            theirs.norms.append(oracle.grad_norm)
            ours.norms.append(engine.grad_norm)
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


def test_requires_grad_turned_off_and_on_is_that_of_memory(tmp_path):
    oracle, ours, theirs = CASE.oracle(), Trained(), Trained()
    with CASE.engine(tmp_path) as engine:
        for step in range(6):
            for model in (oracle.model, engine.module):
                model.blocks[step % 2].up.requires_grad_(step % 3 == 0)
                model.head.requires_grad_(step != 4)
            engine_step(engine, CASE, step, ours)
            oracle_step(oracle, CASE, step, theirs)
        for model in (oracle.model, engine.module):
            model.requires_grad_(True)
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))


@pytest.mark.parametrize("overlap", ["speculate", "hold"])
def test_a_group_may_hold_what_is_frozen_from_the_start(overlap, tmp_path):
    """As `AdamW(model.parameters())` does: units without any state are not updated ahead."""
    case = dataclasses.replace(CASE, frozen=("blocks.0.", "embed"))
    model = case.model()
    groups = [{"params": list(model.parameters()), **case.groups[0].settings()}]
    settings = case.settings(model, tmp_path) | {"params": groups, "overlap": overlap}
    with OffloadEngine(model, **settings) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


def test_a_state_dict_loads_inside_gathered_and_replaces_the_masters(tmp_path):
    other = models.build(zoo.Small, seed=5)
    with CASE.engine(tmp_path) as engine:
        engine_step(engine, CASE, 0, Trained())
        with engine.gathered():
            engine.module.load_state_dict(other.state_dict())
        for name, param in other.named_parameters():
            assert torch.equal(engine.full_fp32_param(name), param.detach()), name
        engine_step(engine, CASE, 1, Trained())
