"""`generate` has traces of its own: going to an evaluation and back costs no misses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture

from offload import OffloadEngine

SETTINGS = {
    "optimizer": "adamw",
    "host_memory": "16MiB",
    "device_memory": "8MiB",
    "chunk_elems": 2048,
    "placement": "disk",  # everything moves
    "param_persistence_threshold": 0,
    "device": "cpu",
}
PROMPT = torch.tensor([[5, 6, 7]])


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="the hf extra is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


MODELS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "decoder": ("llama", lambda model: model),
    "encoder and decoder": ("t5", lambda model: model),
    "adapters": ("llama", with_adapters),
}


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest) -> tuple[Architecture, Any]:
    name, wrap = MODELS[request.param]
    return ARCHITECTURES[name], wrap(ARCHITECTURES[name].build())


class Run:
    """One engine; each action tells how many fetches it made, and how many were not prefetched."""

    def __init__(self, engine: OffloadEngine, kind: Architecture) -> None:
        self.engine = engine
        self.kind = kind
        self.step = 0

    def train(self) -> None:
        self.engine.train()
        self.engine.backward(self.engine(**self.kind.batches(self.step)).loss)
        self.engine.step()
        self.step += 1

    def evaluate(self) -> None:
        self.engine.eval()
        with torch.no_grad():
            self.engine(**self.kind.batches(99))

    def generate(self, length: int = 5) -> list[int]:
        self.engine.eval()
        found = self.engine.module.generate(
            input_ids=PROMPT, max_new_tokens=length, min_new_tokens=length, do_sample=False
        )
        return found[0].tolist()

    def counted(self, action: Callable[[], Any]) -> tuple[int, int]:
        self.engine._parts.ground.ledger.finish()  # what an update is writing is not prefetched
        metrics = self.engine.metrics
        fetches, hits = sum(metrics.fetches.values()), metrics.hits
        action()
        fetched = sum(metrics.fetches.values()) - fetches
        return fetched, fetched - (metrics.hits - hits)


def test_once_each_is_known_none_makes_the_others_miss(made, tmp_path: Path) -> None:
    kind, model = made
    with OffloadEngine(model, nvme_path=tmp_path, **SETTINGS) as engine:
        run = Run(engine, kind)
        for _ in range(3):
            run.train()
        run.evaluate()
        run.generate()
        actions = [
            run.generate, run.evaluate, run.generate, lambda: run.generate(2), run.evaluate,
            run.train, run.generate, run.train, run.evaluate, lambda: run.generate(7), run.train,
        ]  # fmt: skip
        found = [run.counted(action) for action in actions]
        assert [missed for _, missed in found] == [0] * len(actions)
        assert all(fetched > 0 for fetched, _ in found)


def test_generate_is_the_models_own_before_and_after(made, tmp_path: Path) -> None:
    kind, model = made
    own = dict(model.__dict__)
    with OffloadEngine(model, nvme_path=tmp_path, **SETTINGS) as engine:
        assert Run(engine, kind).generate() == Run(engine, kind).generate()
        assert model.generate.__doc__ == type(model).generate.__doc__
    assert model.__dict__.keys() == own.keys()


def test_an_error_inside_generate_ends_its_pass(made, tmp_path: Path) -> None:
    kind, model = made

    class Stop:
        def __init__(self) -> None:
            self.left = 2

        def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return scores

    with OffloadEngine(model, nvme_path=tmp_path, **SETTINGS) as engine:
        run = Run(engine, kind)
        for _ in range(2):
            run.train()
        expected = run.generate()
        with pytest.raises(KeyboardInterrupt):
            engine.module.generate(PROMPT, max_new_tokens=9, logits_processor=[Stop()])
        assert engine._parts.residency.phase.name == "IDLE"
        assert run.generate() == expected
        run.train()
