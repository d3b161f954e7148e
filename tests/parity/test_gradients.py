"""`p.grad` between backward and `step()`: what a user reads, edits, assigns and clears counts.

In memory the same is done to the gradients that the oracle keeps, in the form in which it does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from case import (
    BF16,
    FP16,
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    same_bits,
    train_in_memory,
)
from torch import Tensor, nn

from offload import OffloadEngine
from offload.engine import outer_loop
from offload.errors import StateError

CASE = Case()
PLACES = {
    "disk": (CASE, {}),
    "fp32": (Case(dtype=FP32), {}),
    "spilled": (CASE, {"host_memory": "1MiB"}),
    "accumulated": (Case(accumulation=2), {}),
    "accumulated-spilled": (Case(accumulation=2), {"host_memory": "1MiB"}),
    "widened": (Case(accumulation=2), {"gradient_accumulation_steps": 1}),
    "all-persistent": (CASE, {"param_persistence_threshold": 10**6}),
    "some-persistent": (CASE, {"param_persistence_threshold": 3000}),
    "held": (CASE, {"overlap": "hold"}),
    "speculated": (CASE, {"overlap": "speculate"}),
    "fp16": (Case(dtype=FP16, scaling=(("initial_scale_power", 10), ("hysteresis", 1))), {}),
}
Edit = Callable[[Iterable[nn.Parameter]], object]


def clip_norm(params: Iterable[nn.Parameter]) -> Tensor:
    return nn.utils.clip_grad_norm_(params, 0.02)


def clip_value(params: Iterable[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(params, 1e-4)


def scale_below_autograd(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.grad.data.mul_(0.5)


def assign(params: Iterable[nn.Parameter]) -> None:
    for index, param in enumerate(params):
        if index % 3 == 0:
            param.grad = param.grad * -2
            param.grad.add_(1e-3)


def drop_some(params: Iterable[nn.Parameter]) -> None:
    for index, param in enumerate(params):
        if index % 4 == 1:
            param.grad = None


def add_noise(params: Iterable[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(5)
    for param in params:
        noise = torch.randn(param.shape, generator=generator) * 1e-3
        param.grad += noise.to(param.grad.dtype)


def look(params: Iterable[nn.Parameter]) -> list[float]:
    return [param.grad.float().norm().item() for param in params]


EDITS: list[Edit] = [
    clip_norm, clip_value, scale_below_autograd, assign, drop_some, add_noise, look,
]  # fmt: skip


def twins(oracle, case: Case) -> dict[str, nn.Parameter]:
    """Parameters whose gradients are what the oracle keeps, in the form of a user's."""
    kept_type = FP32 if case.accumulation > 1 or case.scaling else case.dtype
    found = {}
    for name, param in oracle.model.named_parameters():
        twin = nn.Parameter(torch.zeros(param.shape, dtype=kept_type))
        kept = oracle.states[name].kept
        if kept is not None:
            twin.grad = (kept / oracle.scale).view(param.shape).to(kept_type)
        found[name] = twin
    return found


def take_back(oracle, case: Case, found: dict[str, nn.Parameter]) -> None:
    for name, twin in found.items():
        state = oracle.states[name]
        state.kept = None
        if twin.grad is not None:
            state.kept = (twin.grad.flatten().float() * oracle.scale).clone()
            if case.scaling:
                state.kept = state.kept.half().float()


def backward_both(engine, oracle, case: Case, step: int) -> None:
    for batch in case.batches(step):
        (engine.scale(engine(*batch)) / case.accumulation).backward()
        (oracle.model(*batch) * oracle.scale / case.accumulation).backward()
        oracle.keep_gradients()


def step_both(engine, oracle) -> None:
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    oracle.step()


def assert_equal_now(engine, oracle) -> None:
    assert_same(collect_engine(engine, Trained()), collect_oracle(oracle, Trained()))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_an_edit_of_gradients_is_what_the_step_sees(place, edit, tmp_path):
    case, settings = PLACES[place]
    oracle = case.oracle()
    with case.engine(tmp_path, **settings) as engine:
        for step in range(3):
            backward_both(engine, oracle, case, step)
            theirs = twins(oracle, case)
            ours, expected = edit(engine.module.parameters()), edit(theirs.values())
            assert (ours is None and expected is None) or ours == expected
            take_back(oracle, case, theirs)
            for name, param in engine.module.named_parameters():
                assert_gradient(engine, param, theirs[name], name)
            step_both(engine, oracle)
            assert all(param.grad is None for param in engine.module.parameters())
        assert engine.grad_norm == oracle.grad_norm
        assert_equal_now(engine, oracle)


def assert_gradient(engine, param, twin, name: str) -> None:
    if twin.grad is None:
        assert param.grad is None, name
        assert engine.kept_grad(param) is None
        return
    assert param.grad.device.type == "cpu"
    assert same_bits(param.grad, twin.grad), name
    assert same_bits(engine.kept_grad(param), twin.grad), name


@pytest.mark.parametrize("settings", [{}, {"param_persistence_threshold": 3000},
                                      {"host_memory": "1MiB"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_edits_between_micro_steps_are_added_to(dtype, settings, tmp_path):
    case = Case(dtype=dtype, accumulation=2)
    oracle = case.oracle()
    with case.engine(tmp_path, **settings) as engine:
        for step in range(3):
            for first, batch in zip((True, False), case.batches(step), strict=True):
                engine(*batch).backward()
                oracle.model(*batch).backward()
                oracle.keep_gradients()
                if first:
                    theirs = twins(oracle, case)
                    clip_value(engine.module.parameters())
                    clip_value(theirs.values())
                    take_back(oracle, case, theirs)
            step_both(engine, oracle)
        assert_equal_now(engine, oracle)


def test_reading_gradients_voids_no_update_and_editing_them_redoes_it(tmp_path):
    case = dataclasses.replace(CASE, num_steps=2)
    with case.engine(tmp_path, overlap="speculate") as engine:
        history = engine._parts.speculator.history
        for step, edit in enumerate((look, look, clip_value)):
            before = history.kept_elems, history.redone_elems
            engine(*case.batches(step)[0]).backward()
            edit(engine.module.parameters())
            engine.optimizer.step()
            kept, redone = history.kept_elems - before[0], history.redone_elems - before[1]
            assert (kept > 0, redone > 0) == ((True, False) if edit is look else (False, True))


def test_gradients_can_be_read_in_a_gathered_block_and_after_an_evaluation(tmp_path):
    oracle = CASE.oracle()
    for folder, threshold in enumerate((0, 3000)):
        (tmp_path / str(folder)).mkdir()
        with CASE.engine(tmp_path / str(folder), param_persistence_threshold=threshold) as engine:
            (batch,) = CASE.batches(0)
            engine(*batch).backward()
            read = {name: p.grad.clone() for name, p in engine.module.named_parameters()}
            with engine.gathered():
                for name, param in engine.module.named_parameters():
                    assert torch.equal(param.detach(), oracle.model.get_parameter(name))
                    assert torch.equal(param.grad, read[name]), name
            engine.eval()
            with torch.no_grad():
                engine(*batch)
            engine.train()
            for name, param in engine.module.named_parameters():
                assert torch.equal(param.grad, read[name]), name
            engine(*batch)  # a forward whose backward never comes
            for name, param in engine.module.named_parameters():
                assert torch.equal(param.grad, read[name]), name


def test_parameters_are_plain_again_when_something_runs(tmp_path):
    seen = []
    with CASE.engine(tmp_path, param_persistence_threshold=10**6) as engine:
        engine.module.register_forward_pre_hook(
            lambda module, args: seen.extend(map(type, module.parameters()))
        )
        for step in range(2):
            engine(*CASE.batches(step)[0]).backward()
        assert set(map(type, engine.module.parameters())) != {nn.Parameter}
        engine.optimizer.step()
        engine(*CASE.batches(3)[0])
        assert set(seen) == {nn.Parameter}
    assert set(map(type, engine.module.parameters())) == {nn.Parameter}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["optimizer", "module", "after-step"])
@pytest.mark.parametrize("threshold", [0, 10**6])
def test_zero_grad_leaves_what_torch_leaves(how, set_to_none, threshold, tmp_path):
    """A gradient of zeros decays and moves a weight that the next backward does not reach."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model = Chosen(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    model.parts.load_state_dict(plain.state_dict())
    twin = Chosen(plain)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    settings = {"dtype": FP32, "compute_dtype": FP32, "device": "cpu", "lr": 0.01}
    with OffloadEngine(
        model, nvme_path=tmp_path, param_persistence_threshold=threshold, **settings
    ) as engine:
        for step in range(6):
            x = torch.randn(4, 8)
            for module, optimizer in ((model, engine.optimizer), (twin, theirs)):
                zero = module if how == "module" else optimizer
                if how != "after-step":
                    module(x, "ab"[step % 2]).backward()
                    optimizer.zero_grad(set_to_none=set_to_none)
                module(x, "ab"[step % 3 == 1]).backward()
                optimizer.step()
                zero.zero_grad(set_to_none=set_to_none)
        for name, param in twin.named_parameters():
            assert torch.allclose(engine.full_fp32_param(name), param, rtol=1e-5, atol=1e-7), name


class Chosen(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.parts[which](x).square().mean()


@pytest.mark.parametrize("place", PLACES)
def test_an_edit_after_the_norm_was_asked_for_counts(place, tmp_path):
    case, settings = PLACES[place]
    oracle = case.oracle()
    with case.engine(tmp_path, **settings) as engine:
        for step in range(3):
            backward_both(engine, oracle, case, step)
            theirs = twins(oracle, case)
            for twin in theirs.values():
                twin.grad.mul_(0.5)
            read = [param.grad for param in engine.module.parameters()]
            outer_loop.grad_norm(engine)
            for grad in read:
                grad.mul_(0.5)
            take_back(oracle, case, theirs)
            step_both(engine, oracle)
        assert_equal_now(engine, oracle)


def test_clipping_that_was_asked_for_ends_with_the_gradients(tmp_path):
    case = Case(num_steps=3)
    with case.engine(tmp_path) as engine:
        trained = Trained()
        for step in range(case.num_steps):
            engine.backward(engine(*case.batches(50)[0]))
            outer_loop.clip_next_step(engine, 1e-3)
            if step == 1:  # the step is refused
                with engine.gathered("head.weight"), pytest.raises(StateError, match="step"):
                    engine.optimizer.step()
                assert engine._parts.stepper.max_norm == 0
            engine.optimizer.zero_grad()
            engine_step(engine, case, step, trained)
        assert_same(collect_engine(engine, trained), train_in_memory(case))
