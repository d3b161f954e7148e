"""One measured run: `python checkpoint_child.py STORE CHECKPOINTS`; a mark a line, "go" between.

train -> "trained" <- "go"      save (a copy), step meanwhile, load -> "loaded" <- "go"
"""

from __future__ import annotations

import sys

import models
import torch

from offload import OffloadEngine


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def step(engine: OffloadEngine, index: int) -> None:
    engine.backward(engine(*models.batch(index, size=1, seq=8)))
    engine.step()


def main() -> None:
    store, checkpoints = sys.argv[1:]
    torch.set_num_threads(1)
    model = models.build(models.Decoder, width=320, num_blocks=16, num_heads=4)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    engine = OffloadEngine(
        model, nvme_path=store, host_memory="16MiB", device_memory="16MiB",
        param_persistence_threshold=0, compute_dtype=torch.float32, device="cpu",
    )  # fmt: skip
    for index in range(2):
        step(engine, index)
    say(str(num_params))
    saving = engine.save_checkpoint(checkpoints)
    step(engine, 2)
    saving.wait()
    engine.load_checkpoint(checkpoints)
    step(engine, 3)
    engine.close()
    say("loaded")


if __name__ == "__main__":
    main()
