from __future__ import annotations

import numpy as np
import pytest
import torch

from offload.errors import ConfigError, StateError
from offload.kernels import adam_row
from offload.optim.adam import AdamRule
from offload.optim.choice import choose
from offload.optim.reference import TensorState
from offload.optim.rules import StepCounts

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


RULE = AdamRule(decoupled=True)


def new(cls: type[torch.optim.Optimizer], **settings) -> torch.optim.Optimizer:
    return cls([torch.nn.Parameter(torch.zeros(1))], **settings)


@pytest.mark.parametrize(
    ("optimizer", "decoupled"),
    [
        ("adamw", True),
        ("AdamW", True),
        ("adam", False),
        (torch.optim.AdamW, True),
        (torch.optim.Adam, False),
        (new(torch.optim.AdamW), True),
        (new(torch.optim.Adam), False),
    ],
)
def test_the_rule_is_read_from_a_name_a_class_or_an_instance(optimizer, decoupled):
    assert choose(optimizer, None, {}).rule == AdamRule(decoupled)


@pytest.mark.parametrize("optimizer", ["adamax", 3, None, ["adamw"], torch.nn.Linear])
def test_an_unknown_optimizer_is_refused_with_the_choices(optimizer):
    with pytest.raises(ConfigError, match=r"expected one of adamw, adam.*got"):
        choose(optimizer, None, {})


def test_settings_are_shared_out_between_optimizer_and_engine():
    choice = choose("adamw", None, {"lr": 0.5, "eps": None, "host_memory": 7})
    assert (choice.defaults["lr"], choice.defaults["eps"]) == (0.5, 1e-8)
    assert choice.rest == {"host_memory": 7}


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_groups_have_the_keys_and_defaults_of_torch(cls):
    theirs = new(cls).param_groups[0]
    del theirs["params"]
    assert choose(cls, None, {}).defaults == theirs


def test_an_instance_brings_its_groups_and_takes_no_settings_beside():
    instance = new(torch.optim.AdamW, lr=0.25)
    assert choose(instance, None, {}).params is instance.param_groups
    with pytest.raises(ConfigError, match="lr: expected it in the optimizer instance"):
        choose(instance, None, {"lr": 1.0})
    with pytest.raises(ConfigError, match="params: expected none beside"):
        choose(instance, [], {})


def test_an_instance_that_has_stepped_is_refused():
    instance = new(torch.optim.AdamW)
    instance.param_groups[0]["params"][0].grad = torch.ones(1)
    instance.step()
    with pytest.raises(ConfigError, match="expected a new instance"):
        choose(instance, None, {})


@pytest.mark.parametrize("flag", ["amsgrad", "capturable", "differentiable"])
def test_what_the_kernel_cannot_do_is_refused_with_advice(flag):
    with pytest.raises(ConfigError, match=rf"param_groups\[2\]: {flag} is not available\. \w+"):
        RULE.check({**GROUP, flag: True}, 2)
    RULE.check({**GROUP, flag: False}, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": "fast"},
        {"eps": -1e-8},
        {"weight_decay": float("inf")},
        {"betas": (0.9,)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"betas": 0.9},
    ],
)
def test_values_out_of_range_are_refused(change):
    with pytest.raises(ConfigError, match=r"param_groups\[0\]: expected"):
        RULE.check({**GROUP, **change}, 0)


def test_a_missing_value_is_named():
    with pytest.raises(ConfigError, match="expected 'eps'"):
        RULE.check({key: value for key, value in GROUP.items() if key != "eps"}, 0)


def test_a_learning_rate_may_be_a_tensor():
    group = {**GROUP, "lr": torch.tensor(0.5)}
    RULE.check(group, 0)
    assert RULE.row(group, step=1, grad_scale=1.0)["step_size"] == np.float32(0.5 / 0.1)


def test_maximize_turns_the_gradient_round():
    counts = StepCounts(RULE)
    rows, _ = counts.next_rows([({**GROUP, "maximize": True}, ["a"])], grad_scale=0.25)
    assert rows[0]["grad_scale"] == -0.25


def test_rows_are_shared_by_tensors_of_equal_group_and_count():
    counts = StepCounts(AdamRule(decoupled=True))
    counts.advance(["b", "b", "c"])
    other = {**GROUP, "lr": 1e-4}
    rows, row_of = counts.next_rows([(GROUP, ["a", "b", "d"]), (other, ["c"])], grad_scale=0.25)
    assert row_of == {"a": 0, "b": 1, "d": 0, "c": 2}
    for row, (lr, step) in zip(rows, [(1e-2, 1), (1e-2, 3), (1e-4, 2)], strict=True):
        expected = adam_row(lr, (0.9, 0.95), 1e-8, 0.1, step, decoupled=True, grad_scale=0.25)
        assert row.tobytes() == expected.tobytes()


def test_counts_advance_only_when_told_and_survive_a_round_trip():
    counts = StepCounts(AdamRule(decoupled=False))
    counts.next_rows([(GROUP, ["a"])], grad_scale=1.0)
    assert counts["a"] == 0
    counts.advance(["a"])
    other = StepCounts(AdamRule(decoupled=False))
    other.load_state_dict(counts.state_dict())
    assert (other["a"], other["never"]) == (1, 0)
    with pytest.raises(StateError, match="step count of a"):
        other.load_state_dict({"a": -1})


def test_no_tensors_give_no_rows():
    rows, row_of = StepCounts(AdamRule(decoupled=True)).next_rows([(GROUP, [])], grad_scale=1.0)
    assert (len(rows), row_of) == (0, {})


@pytest.mark.parametrize("torch_class", [torch.optim.AdamW, torch.optim.Adam])
def test_ten_steps_stay_close_to_torch_when_a_tensor_misses_some(torch_class):
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(500, generator=random) for name in ("a", "b")}
    parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    optimizer = torch_class(list(parameters.values()), **GROUP)
    counts = StepCounts(choose(torch_class, None, {}).rule)
    states = {name: TensorState.of(weight) for name, weight in weights.items()}
    for step in range(10):
        updated = ["a", "b"] if step % 3 else ["a"]
        rows, row_of = counts.next_rows([(optimizer.param_groups[0], updated)], grad_scale=1.0)
        for name in parameters:
            grad = torch.randn(500, generator=random)
            parameters[name].grad = grad if name in updated else None
            if name in updated:
                assert not states[name].update(grad, rows[row_of[name]])
        optimizer.step()
        counts.advance(updated)
    for name, parameter in parameters.items():
        assert not torch.equal(states[name].master(), weights[name])
        # 4 ulp of max(|w|, lr) a step (fp32 ulp: 2^-23 relative).
        bound = 10 * 4 * 2.0**-23 * torch.clamp(parameter.detach().abs(), min=GROUP["lr"])
        assert torch.all((states[name].master() - parameter.detach()).abs() <= bound)
    assert (counts["a"], counts["b"]) == (10, 6)
