"""offload: what a run would use.  `offload report` tells what this machine offers."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import click

from offload.cli import export, import_, inspect, shell


@click.group("offload", no_args_is_help=False)
@click.version_option(package_name="offload-engine")
def command() -> None:
    """Train models larger than the machine."""


command.add_command(export.command)
command.add_command(import_.command)
command.add_command(inspect.command)


@command.command(
    "plan",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(*, arguments: tuple[str, ...]) -> None:
    """Tell what training a model, or a script, would take here, without doing it."""
    from offload.cli.plan import choose  # what is planned decides the options

    shell.parse(choose(arguments), arguments)


@command.command("report")
@click.argument("folder", callback=shell.one_folder, default=".")
def report(*, folder: Path) -> None:
    """Tell which backend, kernel and devices training in FOLDER would use, and why."""
    import aio
    from offload.cli import machine

    probe = aio.probe(folder)
    lines = list(
        chain(
            machine.storage_lines(folder, probe),
            machine.processor_lines(),
            machine.library_lines(),
        )
    )
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:<{width}}  {value}")
    for note in machine.notes(folder, probe):
        click.echo(f"note: {note}")


def main() -> None:
    shell.parse(command)


if __name__ == "__main__":
    main()
