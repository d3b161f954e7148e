"""A step whose new weights are not finite is lost: every reader sees the generation before it."""

from __future__ import annotations

import pytest
import torch
from case import Case, Trained, assert_same, collect_engine, engine_step

from offload import OffloadEngine
from offload.errors import StateError, StoreError

CASE = Case(num_steps=3)
ROOM = {"host_memory": "64MiB", "device_memory": "64MiB"}
PLACES = {
    "disk": {},
    "host": {**ROOM, "placement": "host"},
    "kept": {"placement": {"weights": "device", "state": "disk"}, **ROOM},
    "small": {"param_persistence_threshold": 10**6, **ROOM},
}


def evaluate(engine: OffloadEngine, times: int = 1) -> float:
    with torch.no_grad():
        return [engine(*CASE.batches(9)[0]).item() for _ in range(times)][-1]


def use_and_finish(engine: OffloadEngine) -> None:
    """A forward may be told already, or use weights of the step and prefetch more."""
    evaluate(engine, 3)
    engine._parts.ground.ledger.finish()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("num_before", [0, 3])  # 0: moments that nobody has written
@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("place", PLACES)
def test_readers_go_back_to_the_last_generation(place, overlap, num_before, tmp_path):
    model = CASE.model()
    settings = {**CASE.settings(model, tmp_path), "overlap": overlap, **PLACES[place]}
    engine = OffloadEngine(model, **settings)
    for step in range(num_before):
        engine_step(engine, CASE, step, Trained())
    before = collect_engine(engine, Trained())
    loss = evaluate(engine)
    engine.optimizer.param_groups[0]["lr"] = 1e39  # too large for float32
    engine_step(engine, CASE, num_before, Trained())
    with pytest.raises(StateError, match="got Inf or NaN"):
        use_and_finish(engine)
    assert_same(collect_engine(engine, Trained()), before)
    assert evaluate(engine) == loss
    with pytest.raises(StoreError, match="opened again"):  # nothing more is written
        engine_step(engine, CASE, 0, Trained())
    assert_same(collect_engine(engine, Trained()), before)
    engine.close()
