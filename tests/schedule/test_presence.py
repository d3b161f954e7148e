"""The most that the device holds, by hand and beside an engine at work."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
from shapes import ELEMS, FORMATS, layout_of

from offload import OffloadEngine
from offload.errors import BudgetError
from offload.partition.unit import TensorSpec, lay_out
from offload.schedule.device import device_least_bytes, gradient_bytes
from offload.schedule.presence import device_peak_bytes
from offload.schedule.traffic import Uses


def test_backward_holds_weights_and_gradients_of_a_unit_and_the_small_tensors() -> None:
    small = (128 + 64) * FORMATS.compute  # weights of both, the gradient of one
    assert device_peak_bytes(layout_of(), Uses.guessed(3, 1)) == small + 2 * ELEMS * 2


def test_in_layer_major_order_the_gradients_of_all_micro_steps_are_there() -> None:
    small = (128 + 3 * 64) * FORMATS.compute
    uses = Uses.guessed(3, 3, by_layers=True)
    assert device_peak_bytes(layout_of(), uses) == small + (1 + 3) * ELEMS * 2


@pytest.mark.parametrize(("alive", "all_of"), [(1, 3), (4, 6)])
def test_the_last_module_of_a_tied_weight_has_two_more_of_its_gradient(alive, all_of) -> None:
    tied = lay_out("tied", 0, [TensorSpec("w", (64, 128), tied=True)])
    other = lay_out("other", 1, [TensorSpec("v", (64, 64))])
    frozen = lay_out("frozen", 2, [TensorSpec("u", (64, 64), trainable=False, tied=True)])
    found = gradient_bytes([tied, other, frozen], FORMATS, alive=alive)
    assert [sum(sizes) for sizes in found.values()] == [
        all_of * ELEMS * 2, alive * (ELEMS // 2 + ELEMS) * 2, alive * ELEMS * 2,
    ]  # fmt: skip
    least = device_least_bytes([tied, other, frozen], None, FORMATS, alive=alive)
    assert least == (ELEMS + ELEMS // 2 + all_of * ELEMS) * 2


def test_the_least_budget_of_layer_major_order_keeps_no_unit_too_many(tmp_path) -> None:
    """Gradients of all micro-steps are counted when units are chosen that stay."""

    def open_engine(num_bytes: int) -> OffloadEngine:
        return OffloadEngine(
            models.build(models.Decoder, width=64, num_blocks=4), nvme_path=tmp_path,
            param_persistence_threshold=200, compute_dtype="float32", order="layer",
            gradient_accumulation_steps=8, device_memory=num_bytes, host_memory="64MiB",
            placement={"weights": "auto", "state": "disk"}, resume=False,
        )  # fmt: skip

    with pytest.raises(BudgetError, match="gradients of 8 micro-steps of unit") as raised:
        open_engine(1)
    least = int(str(raised.value).rpartition("device_memory=")[2].split()[0])
    weights = 4 * sum(p.numel() for p in models.build(models.Decoder, width=64).parameters())
    for room in (0, weights // 3, weights // 2):
        with open_engine(least + room) as engine:
            assert bool(engine.plan.placement.kept) == bool(room)
            assert engine.plan.device_peak <= least + room


def meter_of(engine: OffloadEngine) -> Any:
    """That of the benchmarks."""
    path = Path(__file__).parents[2] / "benchmarks" / "device_meter.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DeviceMeter(engine)


def peak_of_three_steps(engine: OffloadEngine) -> int:
    """On a thread for which autograd has counted no node yet."""
    count, meter = engine.config.gradient_accumulation_steps, meter_of(engine)

    def steps() -> None:
        with meter:
            for step in range(3):
                engine.train_batch([models.batch(count * step + i) for i in range(count)])

    with ThreadPoolExecutor(1) as thread:
        thread.submit(steps).result()
    return meter.peak


@pytest.mark.parametrize(("count", "order"), [(1, "horizontal"), (3, "horizontal"), (3, "layer")])
@pytest.mark.parametrize("checkpointing", [None, "nonreentrant"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device_memory", [None, "4MiB"], ids=["some stay", "all stay"])
def test_an_engine_holds_what_is_planned(
    device_memory, tied, checkpointing, count, order, tmp_path
) -> None:
    model = models.build(
        models.Decoder, width=64, num_blocks=4, checkpointing=checkpointing, tied=tied, vocab=600
    )
    with OffloadEngine(
        model, nvme_path=tmp_path, param_persistence_threshold=0, compute_dtype="float32",
        order=order, gradient_accumulation_steps=count, device_memory=device_memory,
    ) as engine:  # fmt: skip
        peak, plan = peak_of_three_steps(engine), engine.plan
    assert bool(len(plan.units) - len(plan.placement.kept)) == (device_memory is None)
    assert 0.95 * plan.device_peak <= peak <= 1.02 * plan.device_peak
    assert peak <= plan.device_memory


class Uneven(models.Decoder):
    """Does more in one batch than in the other, in units of one kind."""

    def run_block(self, block, x):
        for _ in range(int(x.detach().abs().sum() * 1000) % 40):
            x = x * 1.0
        return super().run_block(block, x)


def test_layer_major_backward_goes_unit_by_unit_in_uneven_micro_batches(tmp_path) -> None:
    with OffloadEngine(
        models.build(Uneven, width=64, num_blocks=4), nvme_path=tmp_path, order="layer",
        param_persistence_threshold=0, gradient_accumulation_steps=4, compute_dtype="float32",
    ) as engine:  # fmt: skip
        assert peak_of_three_steps(engine) <= 1.02 * engine.plan.device_peak
