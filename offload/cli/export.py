"""offload export: a store's or a checkpoint's weights, in files that others read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import click

from offload.cli import shell


@click.command("export")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Default: what the store moves.",
)
@click.option(
    "--max-shard-size", callback=shell.size, default="5GB", metavar="SIZE", show_default=True,
    help="Most bytes of weights in a file.",
)  # fmt: skip
@click.option(
    "--zero-to-fp32", is_flag=True,
    help="Write one pytorch_model.bin with fp32 weights, as DeepSpeed's zero_to_fp32 does.",
)  # fmt: skip
def command(
    *, sources: Sequence[Path], out: Path, dtype: str | None, max_shard_size: int,
    zero_to_fp32: bool,
) -> None:  # fmt: skip
    """Write the weights of SOURCE to the folder OUT, as safetensors that from_pretrained reads.

    SOURCE: a store's folder, offload-NAME (all of them, where the store is on several drives), a
    checkpoint's folder, or a directory of checkpoints, for its latest.
    """
    import aio
    from offload.config import DTYPES
    from offload.engine.generation import decode
    from offload.interchange import export, stored

    if zero_to_fp32 and dtype not in (None, "fp32"):
        raise click.BadParameter(f"expected fp32 with --zero-to-fp32, got {dtype}.")
    chosen = "fp32" if zero_to_fp32 else dtype
    with shell.one_line(), contextlib.ExitStack() as closing:
        source = closing.enter_context(stored.open_source([_resolve(path) for path in sources]))
        queue = closing.enter_context(contextlib.closing(aio.Queue()))
        state = decode(source.record.payload) if source.record.payload else {}
        model = stored.exportable(
            source, queue, state=state, dtype=DTYPES[chosen] if chosen else None
        )
        if zero_to_fp32:
            files = [export.export_torch_file(model, out, progress=True)]
        else:
            files = export.export_safetensors(
                model, out, max_shard_bytes=max_shard_size, progress=True
            )
    total = shell.text(sum(path.stat().st_size for path in files))
    click.echo(f"generation {source.record.generation}: {total} in {len(files)} files in {out}")


def _resolve(path: Path) -> Path:
    """The folder of a checkpoint, where `path` is a directory of them."""
    from offload.checkpoint.folder import find

    found = find(path, None)
    return found.path if found is not None else path
