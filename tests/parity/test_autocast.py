"""Autocast in a model, or around it: the bits of the same model in memory under autocast."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import models
import pytest
import torch
from case import FP16, Case, Trained, assert_learned, assert_same, collect_engine, train_in_memory
from torch import Tensor


class Autocast(models.Decoder):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens, labels)


INSIDE = Case(kind=Autocast, clipping=0.5)
SCALING = (("initial_scale_power", 10), ("hysteresis", 1))


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize(
    "changed", [{}, {"dtype": FP16, "scaling": SCALING}], ids=["moves-bf16", "moves-fp16"]
)
@pytest.mark.parametrize("checkpointing", [None, "nonreentrant"])
def test_autocast_gives_the_bits_of_memory(
    where: str, changed: dict, checkpointing: str | None, tmp_path: Path
) -> None:
    case = dataclasses.replace(INSIDE, options=(("checkpointing", checkpointing),), **changed)
    plain = dataclasses.replace(case, kind=models.Decoder)
    trained = Trained()
    with (case if where == "inside" else plain).engine(tmp_path) as engine:
        for step in range(case.num_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
                loss = engine(*case.batches(step)[0])
            engine.backward(loss)
            engine.step()
            trained.losses.append(loss.item())
            trained.norms.append(engine.grad_norm)
            trained.scales += [engine.scale.value] if case.scaling else []
        collect_engine(engine, trained)
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))
    assert trained.losses != train_in_memory(plain).losses
