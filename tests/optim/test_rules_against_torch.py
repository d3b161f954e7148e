"""Rules with kernels, step by step, against torch in float64 or the published algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import optim

from offload import kernels
from offload.errors import ConfigError
from offload.optim.choice import choose, progress_of

NUM_STEPS, SIZE = 12, 700
U = 2.0**-24


class Lion64(optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, line by line."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = torch.sign(beta1 * momentum + (1 - beta1) * param.grad)
                param.sub_(group["lr"] * (update + group["weight_decay"] * param))
                self.state[param]["exp_avg"] = beta2 * momentum + (1 - beta2) * param.grad


CASES = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-3}),
    (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
    (Lion64, {"lr": 0.01}),
    (Lion64, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_twelve_steps_stay_close_to_float64(cls, settings):
    """A parameter that misses steps keeps its own count, and its first update its own start."""
    random = torch.Generator().manual_seed(0)
    start = {name: torch.randn(SIZE, generator=random) for name in ("a", "b")}
    theirs = {name: torch.nn.Parameter(value.double()) for name, value in start.items()}
    reference = cls(list(theirs.values()), **settings)
    rule = choose("lion" if cls is Lion64 else cls, None, settings).rule
    group = {**rule.defaults, **settings, "params": []}
    progress = progress_of(rule)
    ours = {name: value.numpy().copy() for name, value in start.items()}
    states = {name: [np.zeros(SIZE, "f4") for _ in rule.states] for name in start}
    moved = dict.fromkeys(start, 0.0)
    for step in range(NUM_STEPS):
        names = ["a", "b"] if step % 3 == 1 else ["a"]
        rows, row_of = progress.next_rows([(group, names)], grad_scale=0.5)
        before = {name: theirs[name].detach().clone() for name in names}
        for name in theirs:
            grad = torch.randn(SIZE, generator=random)
            theirs[name].grad = 0.5 * grad.double() if name in names else None
            if name in names:
                kept = [
                    kernels.State(state, data)
                    for state, data in zip(rule.states, states[name], strict=True)
                ]
                row = rows[row_of[name]]
                assert not kernels.update(kernels.Whole(ours[name]), kept, grad, row=row)
        reference.step()
        progress.advance(names)
        for name in names:
            moved[name] += (theirs[name].detach() - before[name]).abs().numpy()
    for name in theirs:
        expected = theirs[name].detach().numpy()
        # A step adds half an ulp of the weight, and some of what it moves; the largest of both.
        bound = NUM_STEPS * U * 2 * np.maximum(np.abs(expected), np.abs(start[name].numpy()))
        bound += 16 * U * (moved[name] + NUM_STEPS * settings["lr"])
        assert np.all(np.abs(ours[name] - expected) <= bound)
        assert not np.array_equal(ours[name], start[name].numpy())


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad])
def test_groups_have_the_keys_and_defaults_of_torch(cls):
    theirs = cls([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    del theirs["params"]
    assert choose(cls, None, {}).defaults == theirs


def test_buffers_are_reserved_when_any_group_has_momentum():
    assert choose("sgd", None, {}).rule.states == ()
    assert choose("sgd", None, {"momentum": 0.5}).rule.states == ("momentum_buffer",)
    groups = [{"params": []}, {"params": [], "momentum": 0.9}]
    assert choose("sgd", groups, {}).rule.states == ("momentum_buffer",)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("sgd", {"lr": -1.0}, "lr >= 0"),
        ("sgd", {"momentum": 0.9}, "expected momentum 0.*when the engine was made"),
        ("sgd", {"nesterov": True}, "expected momentum and no dampening with nesterov"),
        ("sgd", {"differentiable": True}, "differentiable is not available"),
        ("lion", {"betas": (0.9, 1.0)}, "two betas"),
        ("lion", {"weight_decay": -1}, "weight_decay >= 0"),
        ("adagrad", {"lr_decay": float("inf")}, "lr_decay >= 0"),
        ("adagrad", {"initial_accumulator_value": -1.0}, "initial_accumulator_value >= 0"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(name, change, words):
    rule = choose(name, None, {}).rule
    with pytest.raises(ConfigError, match=rf"param_groups\[1\]: .*{words}"):
        rule.check({**rule.defaults, **change}, 1)
