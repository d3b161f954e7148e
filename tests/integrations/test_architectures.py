"""Ten architectures train offloaded as they do in memory, bit for bit, and come back from disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, transformers
from oracle import Group, Oracle
from tiny_lm import OFFLOAD, arguments, logged

from offload import OffloadEngine
from offload.integrations.transformers import OffloadTrainer

NUM_STEPS = 4
CLIPPING = 0.5
SETTINGS: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 1e-2,
    "gradient_clipping": CLIPPING,
    "compute_dtype": torch.float32,
    "host_memory": "16MiB",
    "device_memory": "8MiB",
    "chunk_elems": 2048,
    "placement": "disk",  # everything moves
    "param_persistence_threshold": 0,
    "device": "cpu",
}


@pytest.fixture(params=ARCHITECTURES)
def kind(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


@pytest.fixture
def engine(kind: Architecture, tmp_path: Path) -> Iterator[OffloadEngine]:
    with OffloadEngine(kind.build(), nvme_path=tmp_path, **SETTINGS) as made:
        yield made


def generate(model: Any, kind: Architecture) -> list[int]:
    """Between steps; greedy, so that it draws no random numbers."""
    model.eval()
    prompt = torch.tensor([[5, 6, 7]])
    found = model.generate(prompt, max_new_tokens=4, do_sample=False)
    model.train()
    return found[0].tolist()


def train_in_memory(kind: Architecture) -> tuple[Oracle, list[Any]]:
    oracle = Oracle(
        kind.build().train(), torch.bfloat16, torch.float32,
        groups=(Group(lr=1e-2),), clipping=CLIPPING,
    )  # fmt: skip
    rows = []
    torch.manual_seed(7)  # of dropout
    for step in range(NUM_STEPS):
        loss = oracle.model(**kind.batches(step)).loss
        loss.backward()
        oracle.keep_gradients()
        assert oracle.step()
        text = generate(oracle.model, kind) if kind.generates else None
        rows.append((loss.item(), oracle.grad_norm, text))
    return oracle, rows


def train(engine: OffloadEngine, kind: Architecture) -> list[Any]:
    engine.train()
    rows = []
    torch.manual_seed(7)
    for step in range(NUM_STEPS):
        loss = engine(**kind.batches(step)).loss
        engine.backward(loss)
        engine.step()
        text = generate(engine.module, kind) if kind.generates else None
        rows.append((loss.item(), engine.grad_norm, text))
    return rows


def test_losses_norms_answers_and_state_have_the_bits_of_training_in_memory(
    kind: Architecture, engine: OffloadEngine
) -> None:
    oracle, expected = train_in_memory(kind)
    assert train(engine, kind) == expected
    assert len({loss for loss, *_ in expected}) == NUM_STEPS
    for name, state in oracle.states.items():
        master = engine.full_fp32_param(name).flatten()
        assert torch.equal(master, state.master), name
        moment = engine.full_optimizer_state(name, "exp_avg").flatten()
        assert torch.equal(moment, state.exp_avg), name


@pytest.mark.parametrize("door", ["save_pretrained", "export"])
def test_a_saved_model_answers_through_transformers(
    kind: Architecture, engine: OffloadEngine, tmp_path: Path, door: str
) -> None:
    """Whatever names and shapes its files have: experts are cut up in them, and fused again."""
    train(engine, kind)
    folder = tmp_path / "saved"
    if door == "export":
        engine.export(folder)
    else:
        engine.module.save_pretrained(folder)
    engine.eval()
    batch = kind.batches(99)
    with torch.no_grad():
        ours = engine(**batch)
        loaded, report = getattr(transformers, kind.model).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        theirs = loaded.eval()(**batch)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)


def test_a_checkpoint_goes_on_as_if_nothing_had_been(
    kind: Architecture, engine: OffloadEngine, tmp_path: Path
) -> None:
    train(engine, kind)
    engine.save_checkpoint(tmp_path / "checkpoints").wait()
    whole = train(engine, kind)
    other = tmp_path / "other"
    other.mkdir()
    with OffloadEngine(kind.build(), nvme_path=other, **SETTINGS) as again:
        again.load_checkpoint(tmp_path / "checkpoints")
        assert train(again, kind) == whole


def test_the_trainer_trains_it_as_trainer_does(kind: Architecture, tmp_path: Path) -> None:
    """Against torch's AdamW in fp32: only roundings differ."""
    batches = [kind.batches(step) for step in range(NUM_STEPS)]
    rows = [{key: value[i] for key, value in b.items()} for b in batches for i in range(2)]
    args = arguments(tmp_path / "out", gradient_accumulation_steps=1, num_train_epochs=1)
    memory = transformers.Trainer(kind.build(), args, train_dataset=rows)
    memory.train()
    offload = {"nvme_path": tmp_path, **OFFLOAD}
    trainer = OffloadTrainer(kind.build(), args, train_dataset=rows, offload=offload)
    trainer.train()
    trainer.close()
    assert len(logged(memory, "loss")) == NUM_STEPS
    for key in ("loss", "grad_norm"):
        assert logged(trainer, key) == pytest.approx(logged(memory, key), rel=5e-5)
