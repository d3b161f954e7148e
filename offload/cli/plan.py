"""offload plan: what a training script would do here, without doing it.

    offload plan --nvme DIR [options of offload-train] script.py args

The script runs up to the point where it makes its engine: its model is built, nothing is reserved
or trained.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from offload.cli import shell, train

NAME = "offload plan"


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


command = click.Command(
    NAME, params=train.command.params, callback=_plan, help=_plan.__doc__,
    context_settings={"allow_interspersed_args": False},
)  # fmt: skip
