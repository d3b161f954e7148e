"""torch.compile inside and around an engine: the bits of the same compiled model in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import zoo
from case import (
    Case,
    Trained,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    oracle_step,
)
from torch import nn

CASE = Case(kind=zoo.Small, clipping=0.5)


def blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile()
    return model


def in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


@pytest.fixture(scope="module")
def compiler():
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(3))
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")


@pytest.fixture(autouse=True)
def forget_compiled():
    yield
    torch._dynamo.reset()


@dataclasses.dataclass(frozen=True)
class CompiledCase(Case):
    compiled: Callable[[nn.Module], nn.Module] = torch.compile

    def model(self) -> nn.Module:
        return self.compiled(super().model())


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "host"])
@pytest.mark.parametrize(
    "compiled", [blocks, in_place, torch.compile], ids=["blocks", "whole", "wrapped"]
)
def test_a_compiled_model_equals_its_run_in_memory(compiled, place, compiler, tmp_path):
    case = CompiledCase(kind=zoo.Small, clipping=0.5, compiled=compiled)
    ours, theirs, oracle = Trained(), Trained(), case.oracle()
    with case.engine(tmp_path, placement=place) as engine:
        for step in range(case.num_steps):
            engine_step(engine, case, step, ours)
            oracle_step(oracle, case, step, theirs)
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))
