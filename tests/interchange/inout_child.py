"""One measured run in a process of its own: `python inout_child.py SETTINGS` (JSON).

Does everything once with a small model, then with a large one; before each phase of the large one
it says the phase's name and waits for a line, so that the parent can sample the phase's memory.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
import zero_checkpoint

import aio
import offload
from offload.engine.generation import decode
from offload.interchange import export, stored

WIDTH = 448  # 2.4 M parameters a block


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    run = RUNS[settings.get("run", "all")]
    with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
        run(Path(folder), settings, num_blocks=1, begin=lambda phase: None)
        gc.collect()
        num_params = run(Path(folder), settings, num_blocks=settings["num_blocks"], begin=begin)
        begin("end")
        say(json.dumps({"num_params": num_params}))


def begin(phase: str) -> None:
    gc.collect()
    say(phase)
    sys.stdin.readline()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def every_way(
    folder: Path, settings: dict[str, Any], *, num_blocks: int, begin: Callable[[str], None]
) -> int:
    """Every way in and out; the masters stay the same on all of them."""
    engine_settings = {**settings["engine"], "nvme_path": folder, "name": "t", "resume": False}
    options = {"width": WIDTH, "num_heads": 4, "num_blocks": num_blocks}
    begin("construct")
    with offload.on_disk_init(folder):
        model = models.build(models.Decoder, **options)
        model.apply(scale)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    expected = model.blocks[-1].down.weight[0].clone()
    begin("take over")
    engine = offload.OffloadEngine(model, **engine_settings)
    begin("export")
    engine.export(folder / "out", dtype="fp32", max_shard_size="60MB")
    engine.close()
    del engine, model
    begin("export to one file")
    from_closed_store(folder / "offload-t", folder / "single")
    shutil.rmtree(folder / "single")
    begin("load")
    engine = offload.OffloadEngine.from_pretrained(
        folder / "out", make=lambda: models.Decoder(**options), **engine_settings
    )
    found = engine.full_fp32_param(f"blocks.{num_blocks - 1}.down.weight")[0]
    assert torch.equal(found, expected)
    engine.close()
    shutil.rmtree(folder / "out")
    return num_params


def scale(module: torch.nn.Module) -> None:
    """A later pass over all weights."""
    if isinstance(module, torch.nn.Linear):
        module.weight.data.mul_(0.5)


def from_deepspeed(
    folder: Path, settings: dict[str, Any], *, num_blocks: int, begin: Callable[[str], None]
) -> int:
    """A checkpoint, written by another process, becomes an engine's generation."""
    options = {"width": WIDTH, "num_heads": 4, "num_blocks": num_blocks}
    saved = folder / f"zero-{num_blocks}"
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=write_zero, args=(saved, options))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    with offload.on_disk_init(folder):
        model = models.build(models.Decoder, seed=1, **options)
    engine_settings = {**settings["engine"], "nvme_path": folder, "name": "t", "resume": False}
    with offload.OffloadEngine(model, **engine_settings) as engine:
        begin("load deepspeed")
        engine.load_deepspeed(saved)
        assert engine.global_step == 3
    return sum(parameter.numel() for parameter in model.parameters())


def write_zero(folder: Path, options: dict[str, int]) -> None:
    model = models.build(models.Decoder, **options)
    moments = {name: (p.detach(), p.detach() ** 2) for name, p in model.named_parameters()}
    zero_checkpoint.write(folder / "tag", model, moments, num_ranks=2, num_groups=3, step=3)


def from_closed_store(folder: Path, out: Path) -> None:
    with stored.open_source([folder]) as source, aio.Queue() as queue:
        state = decode(source.record.payload)
        model = stored.exportable(source, queue, state=state, dtype=torch.float32)
        export.export_torch_file(model, out)


RUNS = {"all": every_way, "deepspeed": from_deepspeed}


if __name__ == "__main__":
    main()
