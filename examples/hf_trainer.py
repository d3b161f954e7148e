"""Hugging Face's Trainer with an engine under it: a small Llama learns the standard library's text.

    offload-train --nvme /mnt/nvme --host-memory 64MiB --device-memory 64MiB \\
        examples/hf_trainer.py --max_steps 100 --eval_steps 25

Every option of TrainingArguments works (`--help`), `--deepspeed ds_config.json` and
`--resume_from_checkpoint runs/hf_trainer/checkpoint-50` too; `--in-memory` takes the plain Trainer.
"""

from __future__ import annotations

import argparse
from typing import Any

import corpus
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer

from offload.integrations.transformers import OffloadTrainer, OffloadTrainingArguments

DEFAULTS = {
    "output_dir": "runs/hf_trainer",
    "max_steps": 100,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "warmup_steps": 10,
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "save_steps": 50,
    "save_total_limit": 2,
    "report_to": [],
}


def parse_arguments() -> tuple[Any, argparse.Namespace]:
    parser = HfArgumentParser(OffloadTrainingArguments, description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    model = parser.add_argument_group("model and text")
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--width", type=int, default=256)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--seq", type=int, default=64)
    model.add_argument("--in-memory", action="store_true", help="the plain Trainer, no engine")
    args, own = parser.parse_args_into_dataclasses()
    return args, own


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a text, as a causal model takes them."""

    def __init__(self, tokens: torch.Tensor, seq: int) -> None:
        self._windows = tokens[: len(tokens) // seq * seq].view(-1, seq)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}


def make_model(own: argparse.Namespace, vocab: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=own.width, intermediate_size=3 * own.width,
        num_hidden_layers=own.layers, num_attention_heads=own.heads,
        max_position_embeddings=own.seq, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    args, own = parse_arguments()
    text = corpus.load("docs", "bytes")
    model = make_model(own, text.vocab, args.seed)
    data = {
        "train_dataset": Windows(text.train, own.seq),
        "eval_dataset": Windows(text.validation[:8192], own.seq),
    }
    # The path and the budgets come from offload-train; offload={...} would name them here.
    trainer = (Trainer if own.in_memory else OffloadTrainer)(model, args, **data)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"validation loss {loss:.3f} nats per byte; unigram entropy {text.unigram_entropy():.3f}")
    prompt = torch.tensor([list(b"The with statement")])
    trainer.model.eval()
    found = trainer.model.generate(prompt.to(args.device), max_new_tokens=24, do_sample=False)
    print(repr(bytes(found[0].tolist()).decode(errors="replace")))
    if not own.in_memory:
        print(trainer.engine.metrics.report())
        trainer.close()


if __name__ == "__main__":
    main()
