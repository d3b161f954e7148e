"""offload plan: what training would do here, without doing it.

    offload plan [options] 7B | FOLDER | module:function           a model (plan_model.py)
    offload plan --nvme DIR [options of offload-train] script.py args

The script runs up to the point where it makes its engine: its model is built, nothing is reserved
or trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from offload.cli import shell, train

NAME = "offload plan"


def choose(arguments: Sequence[str]) -> click.Command:
    """The command for what is to be planned: a script, or else a model."""
    from offload.cli import plan_model

    target = _target(arguments, plan_model.OPTIONS)
    if target is not None and _is_script(target):
        return script
    return plan_model.command


def _is_script(target: str) -> bool:
    path = Path(target)
    return path.suffix == ".py" or (path.is_file() and path.suffix != ".json")


def _target(arguments: Sequence[str], options: Sequence[click.Parameter]) -> str | None:
    """The first argument that is no option's; None: there is none."""
    known: dict[str, click.Parameter] = {}
    for option in (*train.command.params, *options):
        if isinstance(option, click.Option):
            known.update({name: option for name in option.opts if name not in known})
    reader = click.Command(NAME, params=list(dict.fromkeys(known.values())), add_help_option=False)
    context = click.Context(reader, ignore_unknown_options=True, allow_interspersed_args=False)
    try:
        _, left, _ = reader.make_parser(context).parse_args(list(arguments))
    except click.UsageError:
        return None  # the command that is taken instead says it better
    return next((item for item in left if not item.startswith("-")), None)


def _plan(**given: Any) -> None:
    """Run SCRIPT until it makes its OffloadEngine, print that engine's plan and stop.

    What lives where, the slots, the disk space, what a step moves, and what bounds it as far as the
    drives' profiles tell.
    """
    assert train.command.callback is not None
    job = train.command.callback(**given)
    job = replace(job, environment={**job.environment, "OFFLOAD_PLAN": "1"})
    try:
        train.execute(job)
    except SystemExit as stop:
        plan = getattr(stop, "plan", None)
        if plan is None:
            raise
        click.echo(str(plan))
        return
    except BaseException as error:
        sys.exit(train.report(error, NAME))
    shell.refuse(NAME, f"{job.script}: expected it to make an OffloadEngine, but it made none.")


script = click.Command(
    NAME, params=train.command.params, callback=_plan, help=_plan.__doc__,
    context_settings={"allow_interspersed_args": False},
)  # fmt: skip
