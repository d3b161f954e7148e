"""The most that the device holds, by hand and beside an engine at work."""

from __future__ import annotations

import models
import pytest
from shapes import ELEMS, FORMATS, layout_of

from offload import OffloadEngine
from offload.runtime.gradients import GradientKeeper
from offload.schedule.presence import device_peak_bytes
from offload.schedule.traffic import Uses


def test_backward_holds_weights_and_gradients_of_a_unit_and_the_small_tensors() -> None:
    small = (128 + 64) * FORMATS.compute  # weights of both, the gradient of one
    assert device_peak_bytes(layout_of(), Uses.guessed(3, 1)) == small + 2 * ELEMS * 2


@pytest.mark.parametrize("checkpointing", [None, "nonreentrant"])
def test_an_engine_holds_no_more(checkpointing, tmp_path, monkeypatch) -> None:
    engine = OffloadEngine(
        models.build(models.Decoder, width=64, num_blocks=4, checkpointing=checkpointing),
        nvme_path=tmp_path, param_persistence_threshold=0, compute_dtype="float32",
    )  # fmt: skip
    peak = 0
    take = GradientKeeper.take

    def watched(keeper, bound) -> None:
        nonlocal peak
        here = engine._parts.residency.present.values()
        grads = [p.grad for unit in here for p in unit.parameters if p.grad is not None]
        peak = max(peak, sum(u.weight_bytes for u in here) + sum(g.nbytes for g in grads))
        take(keeper, bound)

    monkeypatch.setattr(GradientKeeper, "take", watched)
    with engine:
        for index in range(3):
            engine.backward(engine(*models.batch(index)))
            engine.step()
        told = engine.plan.device_peak
    assert 0.9 * told <= peak <= 1.1 * told
