"""The loss scale: DeepSpeed's rules, and with hysteresis 1 those of torch's GradScaler."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from offload.config import make_config
from offload.errors import StateError
from offload.optim.loss_scale import LossScale


def make(**settings: Any) -> LossScale:
    return LossScale(make_config({"nvme_path": "/tmp", "dtype": "fp16", **settings}, {}))


def follow(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; x: one that overflows."""
    values = []
    for step in overflows:
        scale.update(overflow=step == "x")
        values.append(scale.value)
    return values


def test_the_first_scale_is_two_to_the_sixteenth() -> None:
    assert make().value == 65536
    assert make(initial_scale_power=4).value == 16
    assert make(loss_scale=3.0).value == 3
    assert make(dtype="bf16").value == 1


def test_it_doubles_after_a_window_without_overflow() -> None:
    scale = make(initial_scale_power=3, loss_scale_window=3)
    assert follow(scale, "......") == [8, 8, 16, 16, 16, 32]


def test_an_overflow_begins_a_new_window() -> None:
    scale = make(initial_scale_power=3, loss_scale_window=3, hysteresis=1)
    assert follow(scale, "..x...x.") == [8, 8, 4, 4, 4, 8, 4, 4]


def test_hysteresis_is_spent_once_and_refilled_by_growth() -> None:
    scale = make(initial_scale_power=5, loss_scale_window=4, hysteresis=3)
    #      two are forgiven     then each one halves    4 in a row: doubles, and forgives again
    assert follow(scale, "xx" + "x.x" + "...." + "xxx") == [
        32, 32, 16, 16, 8, 8, 8, 8, 16, 16, 16, 8,
    ]  # fmt: skip


def test_consecutive_hysteresis_is_refilled_by_any_step() -> None:
    scale = make(initial_scale_power=5, hysteresis=2, consecutive_hysteresis=True)
    assert follow(scale, "x.x.xx") == [32, 32, 32, 32, 32, 16]


def test_it_stops_at_the_minimum_and_says_so() -> None:
    scale = make(initial_scale_power=3, hysteresis=1, min_loss_scale=3)
    assert follow(scale, "xx") == [4, 3]
    with pytest.raises(StateError, match="at the least scale, 3"):
        scale.update(overflow=True)
    assert scale.value == 3


def test_a_fixed_scale_never_moves() -> None:
    assert set(follow(make(loss_scale=8), "x.x...")) == {8}


def test_hysteresis_one_is_torchs_grad_scaler() -> None:
    """Its own operator, over random overflows."""
    choices = random.Random(5)
    steps = "".join(choices.choice("...x") for _ in range(200))
    theirs, value = [], torch.full((1,), 2.0**16)
    tracker = torch.zeros(1, dtype=torch.int32)
    for step in steps:
        found = torch.full((1,), float(step == "x"))
        torch._amp_update_scale_(value, tracker, found, 2.0, 0.5, 3)
        theirs.append(value.item())
    scale = make(hysteresis=1, loss_scale_window=3, min_loss_scale=2.0**-24)
    assert follow(scale, steps) == theirs
    assert len(set(theirs)) > 5


def test_its_state_goes_on_where_it_was() -> None:
    steps = "x..x.xx....x..xx...."
    settings = {"loss_scale_window": 3, "hysteresis": 2}
    straight = follow(make(**settings), steps)
    for cut in range(len(steps)):
        first, second = make(**settings), make(**settings)
        before = follow(first, steps[:cut])
        second.load_state_dict(first.state_dict())
        assert before + follow(second, steps[cut:]) == straight
    fixed = make(loss_scale=8)
    fixed.load_state_dict(first.state_dict())
    assert fixed.value == 8


def test_a_half_loss_is_scaled_in_fp32() -> None:
    loss = torch.tensor(4.0, dtype=torch.float16)
    assert make()(loss).item() == 4 * 65536
    assert make(dtype="bf16")(loss) is loss
