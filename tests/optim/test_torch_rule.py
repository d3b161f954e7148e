"""What trials find out about a torch class before anything is allocated."""

import pytest
import torch
from torch import optim

from offload.errors import ConfigError
from offload.optim.choice import choose
from offload.optim.torch_rule import TorchProgress, TorchRule
from offload.optim.torch_step import TorchRow, freeze, thaw


@pytest.mark.parametrize(
    ("cls", "settings", "states"),
    [
        (optim.RAdam, {}, ("exp_avg", "exp_avg_sq")),
        (optim.RMSprop, {}, ("square_avg",)),
        (optim.RMSprop, {"momentum": 0.9}, ("momentum_buffer", "square_avg")),
        (optim.ASGD, {}, ("ax",)),
    ],
)
def test_an_elementwise_class_is_recognised_with_its_states(cls, settings, states):
    rule = choose(cls, None, settings).rule
    assert isinstance(rule, TorchRule)
    assert (rule.states, rule.whole) == (states, False)


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.Muon])
def test_a_class_that_cannot_be_cut_is_recognised(cls):
    assert choose(cls, None, {}).rule.whole


def test_states_of_all_groups_are_reserved():
    groups = [{"params": []}, {"params": [], "momentum": 0.9}]
    rule = choose(optim.RMSprop, groups, {}).rule
    assert rule.states == ("momentum_buffer", "square_avg")


def test_packed_states_follow_the_shape():
    rule = choose("adafactor", None, {}).rule
    assert rule.state_shapes((30, 40), "w") == {"row_var": (30, 1), "col_var": (1, 40)}
    assert rule.state_shapes((7,), "b") == {"variance": (7,)}
    assert rule.state_shapes((), "s") == {"variance": (1,)}


def test_a_tensor_that_the_class_does_not_take_is_named():
    rule = choose(optim.Muon, None, {}).rule
    with pytest.raises(ConfigError, match=r"layer.bias: expected a tensor that Muon takes.*\(3,\)"):
        rule.check_shape((3,), "layer.bias")


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (optim.LBFGS, {}, "needs a closure"),
        (optim.SparseAdam, {}, "dense"),
        (optim.RMSprop, {"momentum": 0.9, "centered": True}, "at most 2 state tensors.*got 3"),
        (optim.RAdam, {"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_a_class_that_cannot_work_is_refused_with_the_reason(cls, settings, words):
    with pytest.raises(ConfigError, match=words):
        choose(cls, None, settings)


class CountsInGroup(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class ScalesByGradient(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param]["largest"] = param.grad.abs().max()
            param.sub_(param.grad / self.state[param]["largest"])


@pytest.mark.parametrize(
    ("cls", "words"),
    [(CountsInGroup, "param_groups that step"), (ScalesByGradient, "depends on gradients")],
)
def test_state_that_cannot_be_kept_is_refused(cls, words):
    with pytest.raises(ConfigError, match=words):
        choose(cls, None, {})


def test_scalar_state_advances_when_told_and_survives_a_round_trip():
    rule = choose(optim.NAdam, None, {}).rule
    group = {**rule.defaults, "params": []}
    progress = TorchProgress(rule)
    param = torch.nn.Parameter(torch.ones(3))
    reference = optim.NAdam([param])
    for _ in range(3):
        progress.next_rows([(group, ["a", "b"])], grad_scale=1.0)
        progress.advance(["a"])
        param.grad = torch.ones(3)
        reference.step()
    other = TorchProgress(rule)
    other.load_state_dict(progress.state_dict())
    rows, row_of = other.next_rows([(group, ["a", "b"])], grad_scale=0.5)
    row = TorchRow.decode(bytes(rows[row_of["a"]]))
    assert row.grad_scale == 0.5
    state = thaw(row.scalars)
    assert torch.equal(state["step"], reference.state[param]["step"])
    assert torch.equal(state["mu_product"], reference.state[param]["mu_product"])
    assert TorchRow.decode(bytes(rows[row_of["b"]])).scalars is None


def test_settings_go_through_a_row_as_they_are():
    values = {"a": (1, (2.5, None)), "b": float("inf"), "c": torch.tensor(0.25), "d": "word"}
    row = TorchRow(freeze(values, optim.SGD, "setting"), None, 1.0)
    found = thaw(TorchRow.decode(row.encode()).settings)
    assert found == values
    assert found["c"].dtype is torch.float32
    with pytest.raises(ConfigError, match="setting 'e'"):
        freeze({"e": object()}, optim.SGD, "setting")
