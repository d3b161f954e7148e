"""offload import: a store with the weights of a model that somebody else saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from offload.cli import shell


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--nvme", "paths", callback=shell.folders, metavar="DIR", multiple=True, required=True,
    help="Folder on a local drive for the store; repeat it for several drives.",
)  # fmt: skip
@click.option("--name", help="Name of the store; default: the model's class and layout.")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16",
    show_default=True,
)  # fmt: skip
@click.option(
    "--make", metavar="MODULE:FUNCTION",
    help="What builds the model, where config.json does not tell.",
)  # fmt: skip
@click.option(
    "--persistence-threshold", type=int, metavar="ELEMENTS",
    help="The engine's param_persistence_threshold.",
)  # fmt: skip
@click.option("--host-memory", callback=shell.size, metavar="SIZE", help="Most memory to hold.")
@click.option(
    "--deepspeed", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Take weights, moments and step counts from this ZeRO-3 checkpoint instead.",
)  # fmt: skip
@click.option("--tag", help="Of the DeepSpeed checkpoint; default: the latest.")
@click.option("--fresh", is_flag=True, help="Discard a store of this name.")
def command(
    *, folder: Path, paths: Sequence[Path], make: str | None, fresh: bool, dtype: str,
    name: str | None, persistence_threshold: int | None, host_memory: int | None,
    deepspeed: Path | None, tag: str | None,
) -> None:  # fmt: skip
    """Make a store of the model in FOLDER (config.json and safetensors), to be trained from.

    An OffloadEngine with this model, path, name, dtype and threshold, and with settings of its own,
    goes on from it with resume=True.
    """
    from offload.engine.facade import OffloadEngine, leave_settings_open
    from offload.interchange.pretrained import make_empty, open_pretrained

    settings: dict[str, Any] = {
        "nvme_path": list(paths), "name": name, "dtype": dtype, "host_memory": host_memory,
        "param_persistence_threshold": persistence_threshold, "device": "cpu",
        "resume": False if fresh else None,
        "existing_store": "Discard it (--fresh), or give the new one another name (--name).",
    }  # fmt: skip
    build: Callable[..., Any] = open_pretrained if deepspeed is None else make_empty
    with shell.one_line():
        model = build(folder, scratch=paths[0], make=_function(make))
        with OffloadEngine(model, **settings) as engine:
            if deepspeed is not None:
                engine.load_deepspeed(deepspeed, tag)
            leave_settings_open(engine)
            click.echo(engine.describe())


def _function(spec: str | None) -> Callable[[], Any] | None:
    from offload.cli.models import function_named

    return None if spec is None else function_named(spec, "--make")
