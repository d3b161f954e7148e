"""Ten architectures of transformers, tiny and random, each with batches that give a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

VOCAB = 61
_DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}


@dataclass(frozen=True)
class Architecture:
    """A model class, its configuration, and its batches; `generates` from `prompt()`."""

    model: str
    config: str
    sizes: dict[str, Any]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    generates: bool = True

    def build(self) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        return getattr(transformers, self.model)(config)

    def batches(self, step: int) -> dict[str, Tensor]:
        return self.batch(torch.Generator().manual_seed(100 + step))


def _tokens(generator: torch.Generator, size: int = 2, seq: int = 9) -> Tensor:
    return torch.randint(3, VOCAB, (size, seq), generator=generator)


def _causal(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _sequences(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, seq=5)}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(3, (2,), generator=generator)}


def _classes(generator: torch.Generator) -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    labels = torch.randint(3, (2,), generator=generator)
    return {"input_ids": _tokens(generator), "attention_mask": mask, "labels": labels}


def _decoder(name: str, **more: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", {**_DECODER, **more}, _causal)


ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
         "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        _causal,
    ),
    "llama": _decoder("Llama", tie_word_embeddings=True),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "mixtral": _decoder("Mixtral", num_local_experts=4, **_EXPERTS),
    "qwen3_moe": _decoder(
        "Qwen3Moe", head_dim=8, num_experts=4, moe_intermediate_size=24, decoder_sparse_step=1,
        **_EXPERTS,
    ),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "t5": Architecture(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
         "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
        _sequences,
    ),
    "vit": Architecture(
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_labels": 3},
        _images, generates=False,
    ),
    "bert": Architecture(
        "BertForSequenceClassification", "BertConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 3},
        _classes, generates=False,
    ),
}  # fmt: skip
