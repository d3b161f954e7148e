"""Gradients leave the device beside compute: in order, within the budgets, with equal numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from case import (
    FP16,
    Case,
    Trained,
    assert_same,
    collect_engine,
    engine_step,
    train_in_memory,
    train_offloaded,
)
from scripted_streams import ScriptedEvent, ScriptedStreams

from offload.errors import BudgetError
from offload.memory.slab import Slab, Slots
from offload.metrics import Metrics
from offload.partition.unit import Unit
from offload.runtime.device import StreamDevice
from offload.runtime.discover import discover
from offload.runtime.evicted import gradient_of
from offload.runtime.landing import Landed
from offload.runtime.streams import Lane

CASE = Case(clipping=1.65, num_steps=4)
CASES = {
    "one": CASE,
    "sums": dataclasses.replace(CASE, accumulation=3),
    "fp32": dataclasses.replace(CASE, dtype=torch.float32),
    "fp16": dataclasses.replace(
        CASE, dtype=FP16, scaling=(("initial_scale_power", 10), ("hysteresis", 1))
    ),
    "bf16 products": dataclasses.replace(CASE, compute_dtype=torch.bfloat16),
    "frozen": dataclasses.replace(CASE, frozen=("blocks.1", "qkv")),
    "checkpointed": dataclasses.replace(CASE, options=(("checkpointing", "nonreentrant"),)),
}


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("host", ["16MiB", "300KB"], ids=["held", "spilled"])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_memory_wherever_gradients_go(
    name, host, overlap, scripted, tmp_path
) -> None:
    case = CASES[name]
    scripted(seed=len(name), lazy=True)
    with case.engine(tmp_path, host_memory=host, overlap=overlap) as engine:
        assert bool(engine.plan.placement.spilled) is (host != "16MiB")
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("order", ["horizontal", "layer"])
def test_all_micro_batches_of_a_step_equal_memory(order, scripted, tmp_path) -> None:
    case = Case(accumulation=4, clipping=0.5, num_steps=3)
    scripted(seed=7)
    trained = Trained()
    with case.engine(tmp_path, order=order) as engine:
        for step in range(case.num_steps):
            trained.losses += [loss.item() for loss in engine.train_batch(case.batches(step))]
            trained.norms.append(engine.grad_norm)
        assert_same(collect_engine(engine, trained), train_in_memory(case))


@pytest.mark.parametrize("seed", range(3))
def test_backward_goes_on_while_gradients_are_on_their_way(
    seed, scripted, tmp_path, monkeypatch
) -> None:
    """No hook waits for a copy of its own unit, and updates begin before the last one has come."""
    waits: list[str] = []
    depth: list[str] = []

    def wait(event, real=ScriptedEvent.wait):
        if event.lane is Lane.OUT and not event.passed:
            waits.extend(depth[-1:])
        real(event)

    def send(landed, unit, grads, to, real=Landed.send):
        depth.append(unit.name)
        real(landed, unit, grads, to)
        depth.pop()

    monkeypatch.setattr(ScriptedEvent, "wait", wait)
    monkeypatch.setattr(Landed, "send", send)
    case = Case(num_steps=3)
    scripted(seed, lazy=True)
    on_their_way, trained = [], Trained()
    with case.engine(tmp_path, overlap="speculate") as engine:
        for step in range(case.num_steps):
            loss = engine(*case.batches(step)[0])
            engine.backward(loss)
            on_their_way.append(engine._parts.keeper._landing.waiting)
            engine.step()
            trained.losses.append(loss.item())
            trained.norms.append(engine.grad_norm)
        assert engine._parts.speculator.history.kept_elems > 0
        assert_same(collect_engine(engine, trained), train_in_memory(case))
    assert all(on_their_way)
    assert waits == []


@pytest.mark.parametrize("spare", [0, 1], ids=["least", "one more"])
def test_the_device_budget_bounds_what_is_on_its_way(
    spare, scripted, tmp_path, monkeypatch
) -> None:
    case, most = Case(num_steps=3), 0

    def make_room(landed, real=Landed.make_room):
        nonlocal most
        real(landed)
        most = max(most, landed._num_bytes)

    monkeypatch.setattr(Landed, "make_room", make_room)
    scripted(seed=1, lazy=True)
    unit = max(parameters_of_blocks(case)) * case.compute_dtype.itemsize
    with case.engine(tmp_path, device_memory=(3 + spare) * unit) as engine:
        assert engine._parts.ground.blueprint.leaving_bytes == spare * unit
        assert_same(train_offloaded(engine, case), train_in_memory(case))
    assert most <= spare * unit
    assert (most > 0) is bool(spare)


@pytest.mark.parametrize("room", [0, 60_000, 200_000, 400_000])
@pytest.mark.parametrize("order", ["horizontal", "layer"])
def test_the_device_holds_no_more_than_its_budget_and_the_plan(
    order, room, scripted, tmp_path, monkeypatch
) -> None:
    """Weights that are present or made ahead, gradients in parameters or on their way."""
    case = Case(accumulation=2 if order == "layer" else 1, num_steps=3)
    scripted(seed=6, lazy=True)
    with pytest.raises(BudgetError) as raised:
        case.engine(tmp_path, device_memory=1, order=order).__enter__()
    budget = int(str(raised.value).rpartition("device_memory=")[2].split()[0]) + room
    peak = 0

    def watched(landed, *args, real=Landed.send):
        nonlocal peak
        peak = max(peak, held_on_device(engine))
        real(landed, *args)

    monkeypatch.setattr(Landed, "send", watched)
    with case.engine(tmp_path, device_memory=budget, order=order, placement="auto") as engine:
        for step in range(case.num_steps):
            engine.train_batch(case.batches(step))
        assert peak <= min(engine.plan.device_peak, budget)


def held_on_device(engine) -> int:
    bound = engine._parts.residency.bound
    holders = [parameter for unit in bound for parameter in unit.parameters]
    layers = engine._parts.hooks._layers
    for index in range(engine.config.gradient_accumulation_steps if layers else 0):
        holders += [leaf for unit in bound for leaf in layers._leaves.of(index, unit)]
    holders = [each for each in holders if each is not None]
    grads = [found for each in holders if (found := gradient_of(each)) is not None]
    weights = sum(unit.weight_bytes for unit in bound if unit._flat is not None)
    on_their_way = engine._parts.keeper._landing._num_bytes
    return weights + on_their_way + sum(grad.nbytes for grad in grads)


def parameters_of_blocks(case: Case) -> list[int]:
    """Elements of each unit, every tensor padded to 64."""
    model = case.model()
    return [sum(-(-p.numel() // 64) * 64 for p in block.parameters()) for block in model.blocks]


@pytest.mark.parametrize("seed", range(3))
def test_two_slots_are_used_again_only_behind_their_copies(seed, scripted, tmp_path) -> None:
    case = Case(num_steps=3)
    scripted(seed, lazy=True)
    with case.engine(tmp_path, host_memory="300KB") as engine:
        assert engine.plan.placement.landing_slots == 2
        assert_same(train_offloaded(engine, case), train_in_memory(case))


def test_gradients_are_read_edited_and_dropped_between_backward_and_step(
    scripted, tmp_path
) -> None:
    case = Case(num_steps=3)
    scripted(seed=2)
    with case.engine(tmp_path) as engine:
        engine(*case.batches(9)[0]).backward()
        assert engine._parts.keeper._landing.waiting
        engine.optimizer.zero_grad()
        assert not engine._parts.lent.has_gradients
        trained = Trained()
        for step in range(case.num_steps):
            loss = engine(*case.batches(step)[0])
            engine.backward(loss)
            for parameter in engine.module.parameters():
                parameter.grad.mul_(1.0)
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e6)
            engine.step()
            trained.losses.append(loss.item())
            trained.norms.append(engine.grad_norm)
        assert_same(collect_engine(engine, trained), train_in_memory(case))


def test_two_backwards_before_a_step_add_up(scripted, tmp_path) -> None:
    case = Case(accumulation=2, num_steps=3)
    scripted(seed=4, lazy=True)
    one = dataclasses.replace(case, accumulation=1)  # no room is planned for sums
    trained = Trained()
    with one.engine(tmp_path, overlap="speculate") as engine:
        for step in range(case.num_steps):
            for batch in case.batches(step):
                loss = engine(*batch)
                (loss / 2).backward()
                trained.losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            trained.norms.append(engine.grad_norm)
        assert_same(collect_engine(engine, trained), train_in_memory(case))


def test_an_error_of_a_copy_is_raised_and_leaves_no_slot_behind(
    scripted, tmp_path, monkeypatch
) -> None:
    case = Case(num_steps=3)
    made = scripted(seed=3, lazy=True)
    with case.engine(tmp_path, overlap="speculate") as engine:
        engine_step(engine, case, 0, Trained())
        slots = engine._parts.ground.memory.landing
        failing = {"left": 3}

        def wait(event, real=ScriptedEvent.wait):
            if event.lane is Lane.OUT:
                failing["left"] -= 1
                if failing["left"] < 0:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
            real(event)

        monkeypatch.setattr(ScriptedEvent, "wait", wait)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine_step(engine, case, 1, Trained())
        monkeypatch.undo()
        assert slots.num_free == len(slots.all)
        assert not engine._parts.keeper._landing.waiting
    assert made[-1].registered == []


def test_gradients_that_are_not_contiguous_are_copied_behind_their_packing() -> None:
    order: list[str] = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.reshape:
                order.append("pack")
            return super().__torch_function__(func, types, args, kwargs or {})

    class Device(StreamDevice):
        def mark(self):
            order.append("mark")
            return super().mark()

    unit, grad = unit_of(6, 4), torch.arange(24.0).view(4, 6).t()
    taken: dict[str, torch.Tensor] = {}
    landed = landing_of(Device(ScriptedStreams(0)))
    landed.send(unit, {"w": grad.as_subclass(Logged)}, Into(taken))
    assert order == ["pack", "mark"]
    landed.settle()
    assert torch.equal(taken["w"], grad.reshape(-1))


class Into:
    """Puts the pieces of tensors together."""

    def __init__(self, taken: dict[str, torch.Tensor]) -> None:
        self.taken = taken

    def keep(self, chunk, pieces) -> None:
        for name, piece in pieces.items():
            before = self.taken.get(name, torch.empty(0))
            self.taken[name] = torch.cat([before, piece])

    def end(self) -> None:
        self.taken["ended"] = torch.empty(0)


def unit_of(*shape: int) -> Unit:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(shape))
    (unit,) = discover(model, persistence_threshold=0).units
    return unit


def landing_of(device: StreamDevice) -> Landed:
    slots = Slots(Slab(8192).region(8192), 2, 4096)
    return Landed(device, slots, chunk_elems=1024, room_bytes=0, metrics=Metrics())


def test_a_device_with_memory_of_its_own_needs_landing_slots(scripted, tmp_path) -> None:
    scripted(seed=0)
    with pytest.raises(BudgetError, match="2 landing slots") as error:
        CASE.engine(tmp_path, host_memory="10KB").__enter__()
    least = int(str(error.value).split("host_memory=")[1].split()[0])
    with CASE.engine(tmp_path, host_memory=least) as engine:
        assert engine.plan.placement.total_bytes == least
        assert_same(train_offloaded(engine, CASE), train_in_memory(CASE))
