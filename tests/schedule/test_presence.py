"""The most that the device holds, by hand and beside an engine at work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import models
import pytest
from shapes import ELEMS, FORMATS, layout_of

from offload import OffloadEngine
from offload.errors import BudgetError
from offload.runtime.evicted import gradient_of
from offload.runtime.gradients import GradientKeeper
from offload.schedule.presence import device_peak_bytes
from offload.schedule.traffic import Uses


def test_backward_holds_weights_and_gradients_of_a_unit_and_the_small_tensors() -> None:
    small = (128 + 64) * FORMATS.compute  # weights of both, the gradient of one
    assert device_peak_bytes(layout_of(), Uses.guessed(3, 1)) == small + 2 * ELEMS * 2


def test_in_layer_major_order_the_gradients_of_all_micro_steps_are_there() -> None:
    small = (128 + 3 * 64) * FORMATS.compute
    uses = Uses.guessed(3, 3, by_layers=True)
    assert device_peak_bytes(layout_of(), uses) == small + (1 + 3) * ELEMS * 2


def test_the_least_budget_of_layer_major_order_keeps_no_unit_too_many(tmp_path) -> None:
    """Gradients of all micro-steps are counted when units are chosen that stay."""

    def open_engine(num_bytes: int) -> OffloadEngine:
        return OffloadEngine(
            models.build(models.Decoder, width=64, num_blocks=4), nvme_path=tmp_path,
            param_persistence_threshold=200, compute_dtype="float32", order="layer",
            gradient_accumulation_steps=8, device_memory=num_bytes, host_memory="64MiB",
            placement={"weights": "auto", "state": "disk"}, resume=False,
        )  # fmt: skip

    with pytest.raises(BudgetError, match="its gradients of 8 micro-steps") as raised:
        open_engine(1)
    least = int(str(raised.value).rpartition("device_memory=")[2].split()[0])
    weights = 4 * sum(p.numel() for p in models.build(models.Decoder, width=64).parameters())
    for room in (0, weights // 3, weights // 2):
        with open_engine(least + room) as engine:
            assert bool(engine.plan.placement.kept) == bool(room)
            assert engine.plan.device_peak <= least + room


def held_now(engine: OffloadEngine) -> int:
    """Bytes of weights and gradients that are there, whether in use or not."""
    parts = engine._parts
    units = list(parts.residency.bound)
    holders = [parameter for unit in units for parameter in unit.parameters]
    if parts.hooks._layers is not None:
        leaves = parts.hooks._layers._leaves
        for index in range(engine.config.gradient_accumulation_steps):
            holders += [
                leaf for unit in units for leaf in leaves.of(index, unit) if leaf is not None
            ]
    grads = [grad for grad in map(gradient_of, holders) if grad is not None]
    weights = sum(unit.weight_bytes for unit in units if unit._flat is not None)
    return weights + sum(grad.nbytes for grad in grads)


class Meter:
    """The most that an engine holds, seen where gradients are about to leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak, self.engine = 0, None
        take = GradientKeeper.take

        def watched(keeper, *bound, **then) -> None:
            if self.engine is not None:
                self.peak = max(self.peak, held_now(self.engine))
            take(keeper, *bound, **then)

        monkeypatch.setattr(GradientKeeper, "take", watched)

    def train(self, engine: OffloadEngine) -> int:
        """The peak of three steps, on a thread for which autograd has counted no node yet."""
        self.engine, count = engine, engine.config.gradient_accumulation_steps

        def steps() -> None:
            for step in range(3):
                engine.train_batch([models.batch(count * step + i) for i in range(count)])

        with ThreadPoolExecutor(1) as thread:
            thread.submit(steps).result()
        return self.peak


@pytest.mark.parametrize(("count", "order"), [(1, "horizontal"), (3, "horizontal"), (3, "layer")])
@pytest.mark.parametrize("checkpointing", [None, "nonreentrant"])
@pytest.mark.parametrize("device_memory", [None, "4MiB"], ids=["some stay", "all stay"])
def test_an_engine_holds_what_is_planned(
    device_memory, checkpointing, count, order, tmp_path, monkeypatch
) -> None:
    meter = Meter(monkeypatch)
    with OffloadEngine(
        models.build(models.Decoder, width=64, num_blocks=4, checkpointing=checkpointing),
        nvme_path=tmp_path, param_persistence_threshold=0, compute_dtype="float32", order=order,
        gradient_accumulation_steps=count, device_memory=device_memory,
    ) as engine:  # fmt: skip
        peak, plan = meter.train(engine), engine.plan
    assert bool(len(plan.units) - len(plan.placement.kept)) == (device_memory is None)
    assert 0.9 * plan.device_peak <= peak <= 1.1 * plan.device_peak
    assert peak <= plan.device_memory


class Uneven(models.Decoder):
    """Does more in one batch than in the other, in units of one kind."""

    def run_block(self, block, x):
        for _ in range(int(x.detach().abs().sum() * 1000) % 40):
            x = x * 1.0
        return super().run_block(block, x)


def test_layer_major_backward_goes_unit_by_unit_in_uneven_micro_batches(
    tmp_path, monkeypatch
) -> None:
    meter = Meter(monkeypatch)
    with OffloadEngine(
        models.build(Uneven, width=64, num_blocks=4), nvme_path=tmp_path, order="layer",
        param_persistence_threshold=0, gradient_accumulation_steps=4, compute_dtype="float32",
    ) as engine:  # fmt: skip
        assert meter.train(engine) <= engine.plan.device_peak
