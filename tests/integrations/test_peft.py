"""LoRA: frozen weights are read and never written, adapters train as in memory and are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Group, Oracle
from tiny_lm import OFFLOAD, arguments, logged, make_data, make_model, transformers

peft = pytest.importorskip("peft", reason="the hf extra is not installed")
from offload import OffloadEngine, kernels  # noqa: E402
from offload.integrations.transformers import OffloadTrainer  # noqa: E402

NUM_STEPS = 4
PROMPT = torch.tensor([[1, 2, 3, 4]])


def make_lora(base_dtype: torch.dtype = torch.float32) -> Any:
    base = make_model(tie_word_embeddings=False).to(base_dtype)
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    with torch.no_grad():  # a zero B would leave A without gradient at first
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def batch(step: int) -> dict[str, torch.Tensor]:
    rows = make_data()[2 * step : 2 * step + 2]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_adapters_train_as_in_memory_and_the_frozen_are_never_written(
    tmp_path: Path, base: torch.dtype
) -> None:
    """A base in 16 bits keeps its adapters in fp32, as peft makes them."""
    oracle = Oracle(
        make_lora(base).train(), torch.bfloat16, torch.float32, groups=(Group(lr=1e-2),)
    )
    expected = []
    for step in range(NUM_STEPS):
        loss = oracle.model(**batch(step)).loss
        loss.backward()
        oracle.keep_gradients()
        assert oracle.step()
        expected.append((loss.item(), oracle.grad_norm))
    model = make_lora(base)
    found = []
    with OffloadEngine(
        model, nvme_path=tmp_path, optimizer="adamw", lr=1e-2, dtype="bf16", **OFFLOAD
    ) as engine:
        frozen = {n: engine.full_fp32_param(n) for n, p in model.named_parameters()
                  if not p.requires_grad}  # fmt: skip
        start = engine.metrics.total_write_bytes
        for step in range(NUM_STEPS):
            loss = engine(**batch(step)).loss
            engine.backward(loss)
            engine.step()
            found.append((loss.item(), engine.grad_norm))
        assert found == expected
        for name, state in oracle.states.items():
            assert "lora" in name
            assert torch.equal(engine.full_fp32_param(name).flatten(), state.master), name
        assert all(torch.equal(engine.full_fp32_param(n), w) for n, w in frozen.items())
        trainable = sum(state.hi.numel() for state in oracle.states.values())
        written = engine.metrics.total_write_bytes - start
        # 12 bytes a parameter and step, and whole pages of each of a unit's roles.
        assert written <= NUM_STEPS * (12 * trainable + 40 * 4 * 4096)
        check_adapters(engine, model, tmp_path / "adapters", base)


def check_adapters(
    engine: OffloadEngine, model: Any, folder: Path, base_dtype: torch.dtype
) -> None:
    """What save_pretrained writes is small, and gives the same logits on the base."""
    model.save_pretrained(folder)
    assert (folder / "adapter_model.safetensors").stat().st_size < 20_000
    base = make_model(tie_word_embeddings=False).to(base_dtype).float()
    for weight in base.parameters():  # the engine moves the frozen ones in 16 bits
        hi = torch.empty(weight.shape, dtype=torch.bfloat16)
        kernels.split(weight.detach(), hi, torch.empty(weight.shape, dtype=torch.int16))
        weight.data = hi.float()
    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    engine.eval()
    with torch.no_grad():
        assert torch.equal(engine(input_ids=PROMPT).logits, loaded(input_ids=PROMPT).logits)
    assert torch.equal(
        *(m.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False) for m in (model, loaded))
    )


def test_the_trainer_trains_adapters_resumes_and_saves_them(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 5, "learning_rate": 1e-2}
    memory = transformers.Trainer(
        make_lora(), arguments(tmp_path / "memory", **saving), train_dataset=make_data()
    )
    memory.train()

    def trainer(number: int) -> OffloadTrainer:
        store = tmp_path / f"nvme-{number}"
        store.mkdir()
        return OffloadTrainer(
            make_lora(), arguments(tmp_path / "out", **saving), train_dataset=make_data(),
            offload={"nvme_path": store, **OFFLOAD},
        )  # fmt: skip

    whole = trainer(0)
    whole.train()
    for key in ("loss", "grad_norm"):
        assert logged(whole, key) == pytest.approx(logged(memory, key), rel=5e-5)
    again = trainer(1)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert logged(again, "loss") == logged(whole, "loss")
    again.save_model(str(tmp_path / "saved"))
    base = make_model(tie_word_embeddings=False)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    again.model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=PROMPT).logits, again.model(input_ids=PROMPT).logits)
    whole.close()
    again.close()
