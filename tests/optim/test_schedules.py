"""DeepSpeed's schedules against tables worked out by hand and against numpy."""

import math

import numpy as np
import pytest
import torch

from offload.errors import ConfigError
from offload.optim.schedules import OWN, scheduler_class

LR = 0.1


def optimizer(*rates: float, cls: type = torch.optim.Adam, **settings) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates or (LR,)]
    return cls(groups, **settings)


def run(kind: str, num_steps: int, *, on: torch.optim.Optimizer | None = None, **params):
    """What each step uses: rates of the first group, and its beta_1."""
    on = on or optimizer()
    scheduler = OWN[kind](on, **params)
    used = []
    for _ in range(num_steps):
        group = on.param_groups[0]
        used.append((float(group["lr"]), group.get("betas", (None,))[0]))
        on.step()
        scheduler.step()
    return [lr for lr, _ in used], [beta for _, beta in used]


BY_HAND = [
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3},
        [0.01, 0.025, 0.04, 0.055, 0.07],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 3, "lr_range_test_staircase": True,
        },
        [0.01, 0.01, 0.04, 0.04, 0.07],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2,
            "cycle_second_step_size": 4, "decay_step_size": 2, "decay_lr_rate": 1.0,
        },
        [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.05, 0.04],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
        },
        [0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1, 0.1],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.02, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1],
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": 0.8, "warmup_num_steps": 8},
        [0.0, 0.0, 0.8 / 3, 0.8 * math.log2(3) / 3, 1.6 / 3],
    ),
    ("WarmupLR", {"warmup_num_steps": 0}, [0.0, 0.0, 0.1, 0.1]),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 0.4,
            "warmup_type": "linear",
        },
        [0.0, 0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0],
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.5,
            "cos_min_ratio": 0.2, "warmup_type": "linear",
        },
        [0.0, 0.05, 0.075, *(0.06 + 0.04 * c for c in (0.5**0.5, 0.0, -(0.5**0.5), -1.0, -1))],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "expected"), BY_HAND)
def test_rates_are_those_worked_out_by_hand(kind, params, expected):
    rates, _ = run(kind, len(expected), **params)
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


def log_warmup(count, num_steps):
    return np.where(count < num_steps, np.log(np.maximum(count, 0) + 1) / np.log(num_steps), 1.0)


def test_two_hundred_steps_equal_the_formulas_in_numpy():
    """The whole curves at once, each formula written for all steps together."""
    done = np.arange(200)
    count = np.maximum(done - 1, 0)
    found, _ = run("WarmupLR", 200, warmup_min_lr=1e-3, warmup_max_lr=0.3, warmup_num_steps=50)
    np.testing.assert_allclose(found, 1e-3 + 0.299 * log_warmup(count, 50), rtol=1e-12)

    params = {"total_num_steps": 180, "warmup_num_steps": 50}
    found, _ = run("WarmupDecayLR", 200, warmup_min_lr=1e-3, warmup_max_lr=0.3, **params)
    decay = np.clip((180 - count) / 130, 0, 1)
    np.testing.assert_allclose(
        found, 1e-3 + 0.299 * np.where(count < 50, log_warmup(count, 50), decay), rtol=1e-12
    )

    found, _ = run("WarmupCosineLR", 200, warmup_min_ratio=0.1, cos_min_ratio=0.02, **params)
    angle = np.pi * np.clip((count - 49) / 130, 0, 1)
    ratio = np.where(
        count < 50, 0.1 + 0.9 * log_warmup(count, 50), 0.51 + 0.49 * np.cos(angle)
    )  # fmt: skip
    np.testing.assert_allclose(found, LR * ratio * (done > 0), rtol=1e-12)

    cycle = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2, "cycle_first_step_size": 60}
    rest = {"cycle_second_step_size": 80, "decay_step_size": 7, "decay_lr_rate": 0.3}
    found, momenta = run("OneCycle", 200, **cycle, **rest, decay_mom_rate=0.001)
    height = np.interp(done, [0, 60, 140], [0, 1, 0])
    units = np.maximum(done - 140, 0) / 7
    np.testing.assert_allclose(found, (0.01 + 0.19 * height) / (1 + 0.3 * units), rtol=1e-12)
    expected = (0.9 - 0.1 * height) * (1 + 0.001 * units)
    expected[0] = 0.8
    np.testing.assert_allclose(momenta, expected, rtol=1e-12)


def test_betas_cycle_as_in_deepspeed_and_momentum_of_others_stays(caplog):
    """Its second beta is 0.99 whatever the optimizer's was; SGD's momentum is not touched."""
    adam = optimizer(0.1, 0.1, betas=(0.9, 0.95))
    scheduler = OWN["OneCycle"](adam, 0.1, 0.2, cycle_first_step_size=2)
    assert [group["betas"] for group in adam.param_groups] == [(0.8, 0.99)] * 2
    adam.step()
    scheduler.step()
    assert [group["betas"] for group in adam.param_groups] == [(pytest.approx(0.85), 0.99)] * 2
    sgd = optimizer(cls=torch.optim.SGD, momentum=0.5)
    OWN["OneCycle"](sgd, 0.1, 0.2)
    assert sgd.param_groups[0]["momentum"] == 0.5
    assert "no betas" in caplog.text
    kept = optimizer()
    OWN["OneCycle"](kept, 0.1, 0.2, cycle_momentum=False)
    assert kept.param_groups[0]["betas"] == (0.9, 0.999)


def test_stairs_are_counted_in_integers():
    """29 / 100 * 100 is below 29 in floats."""
    stairs = {"cycle_first_step_size": 100, "cycle_first_stair_count": 100}
    scheduler = OWN["OneCycle"](optimizer(), 0.0, 1.0, **stairs)
    assert [scheduler.height(done) for done in range(101)] == [n / 100 for n in range(101)]
    assert scheduler.height(171) == 0.29
    assert scheduler.height(300) == 0.0


def test_groups_have_rates_of_their_own():
    on = optimizer(0.1, 0.2)
    scheduler = OWN["WarmupLR"](on, warmup_min_lr=[0.0, 0.1], warmup_num_steps=2)
    assert [group["lr"] for group in on.param_groups] == [0.0, 0.1]
    for _ in range(3):
        on.step()
        scheduler.step()
    assert [group["lr"] for group in on.param_groups] == [0.1, 0.2]
    with pytest.raises(ConfigError, match="one for each of 2 parameter groups, got 3"):
        OWN["LRRangeTest"](on, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(("kind", "params", "expected"), BY_HAND)
@pytest.mark.parametrize("how", ["state_dict", "last_batch_iteration"])
def test_a_schedule_goes_on_where_it_was(kind, params, expected, how):
    first = optimizer()
    scheduler = OWN[kind](first, **params)
    for _ in range(3):
        first.step()
        scheduler.step()
    second = optimizer()
    if how == "state_dict":
        again = OWN[kind](second, **params)
        again.load_state_dict(scheduler.state_dict())
        second.step()
        again.step()
    else:
        OWN[kind](second, **params, last_batch_iteration=3)
    rates, _ = run(kind, 5, **params)
    assert second.param_groups[0]["lr"] == rates[4]


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("WarmupLr", {}, "expected one of LRRangeTest, .* got 'WarmupLr'. Take 'WarmupLR'"),
        ("Optimizer", {}, "got 'Optimizer'"),
        ("WarmupLR", {"warmup_steps": 1}, "no setting 'warmup_steps'. Did you mean 'warmup_num_s"),
        ("WarmupLR", {"warmup_num_steps": "100"}, "expected an integer, got '100'. Remove the quo"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "expected an integer, got 1.5. Correct"),
        ("WarmupLR", {"warmup_max_lr": ["1e-3"]}, "expected a number, or one for each group"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_momentum": 1}, "true or fal"),
        ("StepLR", {"step_size": "100"}, "step_size: expected a number, got '100'. Remove"),
        ("WarmupDecayLR", {}, 'needs total_num_steps, got none. Set it; "auto"'),
    ],
)
def test_a_mistake_in_a_file_names_the_way_out(kind, params, told):
    with pytest.raises(ConfigError, match=told):
        scheduler_class(kind, params)


def test_values_of_the_right_kinds_pass():
    params = {"warmup_num_steps": 1e3, "warmup_max_lr": [1e-3, 1], "warmup_type": "log"}
    assert scheduler_class("WarmupLR", params) is OWN["WarmupLR"]
    assert scheduler_class("ReduceLROnPlateau", {"mode": "max"}) is not None


def test_torch_schedulers_are_found_by_name():
    cls = scheduler_class("CosineAnnealingLR", {"T_max": 3})
    assert cls is torch.optim.lr_scheduler.CosineAnnealingLR


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("WarmupLR", {"warmup_type": "cosine"}, "expected log or linear, got 'cosine'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps: expected at least 0, got -1"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "step_size: expected at least 1"),
    ],
)
def test_values_out_of_range_are_refused(kind, params, told):
    with pytest.raises(ConfigError, match=told):
        OWN[kind](optimizer(), **params)
