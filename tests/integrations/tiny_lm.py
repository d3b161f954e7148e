"""Shared by the tests of Hugging Face: a tiny language model, its data, its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

VOCAB = 67
OFFLOAD: dict[str, Any] = {
    "host_memory": "16MiB",
    "device_memory": "8MiB",
    "chunk_elems": 4096,
    "placement": "disk",  # everything moves
    "param_persistence_threshold": 0,
    "compute_dtype": "float32",
}


def make_model(seed: int = 0, **options: Any) -> Any:
    """A Llama of three layers, tied."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**sizes, **options})
    return transformers.LlamaForCausalLM(config)


def make_data(num: int = 22, seq: int = 12) -> list[dict[str, torch.Tensor]]:
    """Sequences that can be learned: arithmetic ones, of different lengths of what counts."""
    found = []
    for index in range(num):
        tokens = (torch.arange(seq) * (1 + index % 5) + index) % (VOCAB - 1) + 1
        labels = tokens.clone()
        labels[: index % 4] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(folder: Path, *, kind: Any = transformers.TrainingArguments, **changes: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
    }
    return kind(**{**settings, **changes})


def logged(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]
