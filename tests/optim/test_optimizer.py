from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from offload.errors import ConfigError, StateError
from offload.optim.adam import AdamRule
from offload.optim.optimizer import OffloadOptimizer

RULE = AdamRule(decoupled=True)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("step")

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.calls.append(f"zero_grad {set_to_none}")


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def make(model: nn.Module, recorder: Recorder, params=None, **settings) -> OffloadOptimizer:
    return OffloadOptimizer(
        model.parameters() if params is None else params,
        recorder,
        known=model.parameters(),
        rule=RULE,
        defaults={**RULE.defaults, **settings},
    )


def test_step_and_zero_grad_go_to_the_engine_and_leave_parameters_alone(model, recorder):
    optimizer = make(model, recorder)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert recorder.calls == ["step", "zero_grad True", "zero_grad False"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.state == {}


def test_parameters_without_storage_are_enough(model, recorder):
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
    optimizer = make(model, recorder)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert recorder.calls == ["step"]


def test_a_closure_runs_with_gradients_and_its_loss_is_returned(model, recorder):
    optimizer = make(model, recorder)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        recorder.calls.append("closure")
        return torch.tensor(3.0)

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert recorder.calls == ["closure", "step"]


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            [3],
        ),
    ],
)
def test_schedulers_change_the_same_values_as_with_torch(make_scheduler, model, recorder):
    ours = make(model, recorder, lr=1e-2)
    torchs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedulers = make_scheduler(ours), make_scheduler(torchs)
    for _ in range(6):
        for optimizer, scheduler in zip((ours, torchs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        for key in ("lr", "betas"):
            assert ours.param_groups[0][key] == torchs.param_groups[0][key]
    assert ours.param_groups[0]["lr"] != 1e-2


def test_groups_have_their_own_settings(model, recorder):
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.0},
        {"params": [model[1].weight], "lr": 0.5},
    ]
    optimizer = make(model, recorder, groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 1e-2]
    optimizer.add_param_group({"params": [model[0].bias], "betas": (0.5, 0.6)})
    assert optimizer.param_groups[2]["betas"] == (0.5, 0.6)


def test_a_parameter_of_another_model_is_refused_by_name(model, recorder):
    stranger = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"param_groups\[0\], parameter odd: .*engine's model"):
        make(model, recorder, [("good", model[0].weight), ("odd", stranger)])
    optimizer = make(model, recorder)
    with pytest.raises(ConfigError, match=r"param_groups\[1\], parameter 0"):
        optimizer.add_param_group({"params": [stranger]})
    assert len(optimizer.param_groups) == 1


def test_settings_that_cannot_be_are_refused_and_leave_no_group(model, recorder):
    with pytest.raises(ConfigError, match="betas"):
        make(model, recorder, betas=(1.0, 0.9))
    optimizer = make(model, recorder, [model[0].weight])
    with pytest.raises(ConfigError, match="amsgrad"):
        optimizer.add_param_group({"params": [model[1].weight], "amsgrad": True})
    assert len(optimizer.param_groups) == 1


def test_param_groups_survive_a_round_trip(model, recorder):
    optimizer = make(model, recorder, lr=0.25)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    other = make(model, recorder)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.25


def test_moments_of_another_optimizer_are_refused(model, recorder):
    foreign = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    foreign.step()
    with pytest.raises(StateError, match="got moments of 4 parameters"):
        make(model, recorder).load_state_dict(foreign.state_dict())


def test_copies_and_pickles_are_refused_with_the_way_out(model, recorder):
    optimizer = make(model, recorder)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="save_checkpoint"):
            attempt(optimizer)
