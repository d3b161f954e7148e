"""offload-bench: what this machine's drive and memory can do, and with which setting.

offload-bench io /mnt/nvme
offload-bench update
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from offload.cli import io_bench, io_sweep, shell, update_bench
from offload.cli.shell import text

NAME = "offload-bench"
MAX_SECONDS = 24 * 3600


@click.group(NAME, no_args_is_help=False)
def command() -> None:
    """Measure what bounds a training step on this machine."""


@command.command("io")
@click.argument("folder", callback=shell.one_folder)
@click.option(
    "--size", callback=shell.size, default="2GiB", show_default=True, help="Of the test file."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=MAX_SECONDS),
    callback=shell.number,
    help="Write for so long after the sweep: does the rate fall when the drive's cache is full?",
)
@click.option("--json", "as_json", is_flag=True, help="Print the samples as JSON.")
def io(*, folder: Path, size: int, seconds: float | None, as_json: bool) -> None:
    """Sweep backend, block size and depth for reads, writes and both in FOLDER.

    Takes less than a minute (and --seconds).  The test file is written once, has no name and is
    gone when this ends, however it ends.  FOLDER keeps a profile, which engines that use it find
    by themselves, and a picture.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise click.ClickException(
            f"{folder}: expected {text(size)} of free space, got {text(free)}."
            " Free some, or give a smaller --size."
        )
    try:
        with io_sweep.Target(folder, size) as target:
            result = io_bench.measure_all(folder, target, seconds)
        files = io_bench.keep(folder, result)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({**io_bench.as_record(result), **files.as_record()}, indent=1))
    else:
        click.echo(io_bench.report(result))
        for file in files.written:
            click.echo(f"written: {file}")
    for line in [*io_bench.warnings(result), *files.notes]:
        click.echo(f"{NAME}: {line}", err=True)


command.add_command(update_bench.command)


def main() -> None:
    shell.terminate_as_exception()
    shell.parse(command)


if __name__ == "__main__":
    main()
