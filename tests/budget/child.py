"""One measured run in a process of its own: `python child.py SETTINGS` (JSON on the command line).

    import, one step of a one-block model  ->  "warm"  <- "go"     the parent notes the baseline
    build the model                        ->  "built" <- "go"     ... and what the model holds
    run the steps                          ->  a JSON report, the last line

The parent samples this process's memory all the while (memory.py).
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import torch
from torch import nn

from offload import OffloadEngine


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    run = offloaded if settings["engine"] else in_memory
    with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
        run(Path(folder), settings, num_blocks=1, pause=lambda word: None)
        gc.collect()
        pause("warm")
        report = run(Path(folder), settings, num_blocks=settings["num_blocks"], pause=pause)
        say(json.dumps(report))


def pause(word: str) -> None:
    say(word)
    sys.stdin.readline()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def batches(settings: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for index in range(settings["num_steps"]):
        yield models.batch(index, size=settings["batch"], seq=settings["seq"])


def in_memory(
    folder: Path, settings: dict[str, Any], *, num_blocks: int, pause: Any
) -> dict[str, Any]:
    """Forward and backward with the weights in memory; each gradient is dropped as it comes."""
    model = models.build(models.Decoder, num_blocks=num_blocks, **settings["model"])
    pause("built")
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop_gradient)
    for batch in batches(settings):
        model(*batch).backward()
    return {}


def drop_gradient(param: nn.Parameter) -> None:
    param.grad = None


def offloaded(
    folder: Path, settings: dict[str, Any], *, num_blocks: int, pause: Any
) -> dict[str, Any]:
    model = models.build(models.Decoder, num_blocks=num_blocks, **settings["model"])
    num_params = sum(param.numel() for param in model.parameters())
    own = dict(settings["engine"], nvme_path=folder / f"blocks-{num_blocks}")
    own["nvme_path"].mkdir()
    with contextlib.closing(OffloadEngine(model, **own)) as engine:
        gc.collect()
        pause("built")
        for batch in batches(settings):
            engine.backward(engine(*batch))
            engine.step()
    return {"num_params": num_params, "write_bytes": dict(engine.metrics.write_bytes)}


if __name__ == "__main__":
    main()
