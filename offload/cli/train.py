"""offload-train: run a training script whose `OffloadEngine(model)` finds its path and budgets.

    offload-train --nvme DIR script.py args   ==   OFFLOAD_NVME=DIR ... python script.py args

The script runs in this process as `__main__`; its exit status and its tracebacks are its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from offload.choices import ORDERS, PLACES, STATE_DTYPES
from offload.cli import shell
from offload.errors import BudgetError, ConfigError, StoreError

NAME = "offload-train"
VARIABLES = {
    "host_memory": "OFFLOAD_HOST_MEMORY",
    "device_memory": "OFFLOAD_DEVICE_MEMORY",
    "start": "OFFLOAD_RESUME",
    "durability": "OFFLOAD_DURABILITY",
    "aio_backend": "OFFLOAD_AIO_BACKEND",
    "metrics_path": "OFFLOAD_METRICS",
    "timeline_path": "OFFLOAD_TIMELINE",
    "state_dtype": "OFFLOAD_STATE_DTYPE",
    "placement": "OFFLOAD_PLACEMENT",
    "order": "OFFLOAD_ORDER",
}  # what the engine's settings are called in the environment


@dataclass(frozen=True)
class Job:
    """What to run and how."""

    script: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    auto: bool = False


@click.command(NAME, context_settings={"allow_interspersed_args": False})
@click.option(
    "--nvme",
    "folders",
    callback=shell.folders,
    metavar="DIR",
    multiple=True,
    help="Folder on a local drive for the model's state; repeat it for several drives.",
)
@click.option(
    "--config",
    "--deepspeed_config",
    "--deepspeed-config",
    "config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A DeepSpeed configuration file for the script's engine; --nvme wins over its paths.",
)
@click.option(
    "--auto",
    is_flag=True,
    help="Take over the model and the torch optimizer of a script that makes no OffloadEngine.",
)
@click.option(
    "--host-memory",
    callback=shell.size,
    metavar="SIZE",
    help='Most host memory to hold, such as "16GiB".',
)
@click.option(
    "--device-memory", callback=shell.size, metavar="SIZE", help="Most device memory to hold."
)
@click.option("--resume", "start", flag_value="resume", help="Go on from the last committed step.")
@click.option("--fresh", "start", flag_value="fresh", help="Start anew over what the folder holds.")
@click.option(
    "--durability",
    type=click.Choice(["process", "step", "none"]),
    help="What a finished step survives: the process's end, or a power loss too.",
)
@click.option(
    "--state-dtype",
    type=click.Choice(STATE_DTYPES),
    help="How the optimizer's state is kept; weights are exact in each.",
)
@click.option(
    "--placement",
    type=click.Choice(PLACES),
    help="Where weights and state live; auto: in host memory what fits beside the rest.",
)
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    help="Of the micro-steps in train_batch; layer: all of them through a unit before the next.",
)
@click.option(
    "--profile",
    "profiles",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="What `offload-bench io` wrote, one for all drives or one for each; without it, what lies"
    " in DIR is used.",
)
@click.option(
    "--aio-backend",
    type=click.Choice(["auto", "uring", "libaio", "threads"]),
    help="How to reach the drive; auto takes the first that works.",
)
@click.option(
    "--metrics",
    "metrics_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the account of each step, one JSON object a line.",
)
@click.option(
    "--timeline",
    "timeline_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a timeline for Perfetto or chrome://tracing.",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    folders: Sequence[Path],
    profiles: Sequence[Path],
    config: Path | None,
    auto: bool,
    script: Path,
    arguments: tuple[str, ...],
    **settings: str | int | Path | None,
) -> Job:
    """Run SCRIPT with model state on NVMe; its OffloadEngine takes the settings given here.

    With --auto the script is a plain one of PyTorch: its model and its Adam, AdamW, SGD or Adagrad
    are taken over at the model's first forward; what cannot be is said in a line and left alone.
    """
    if not script.is_file():
        raise click.BadParameter(
            f"{script}: expected a Python file, got nothing there.", param_hint="SCRIPT"
        )
    named_later = any(each.startswith("--deepspeed") for each in arguments)  # by the script
    named = folders or config is not None or named_later or os.environ.get("OFFLOAD_NVME")
    if auto and not named:  # else the script may name it, and the engine tells where nobody does
        raise click.MissingParameter(param_type="option", param_hint="'--nvme'")
    start = settings.get("start") or os.environ.get(VARIABLES["start"])
    if auto and start in ("resume", "auto"):
        raise click.UsageError(
            "--resume: expected it without --auto, got both: weights would go on at the last step"
            " while the script begins with its first. Let the script load what it saved."
        )
    check_separators({"--nvme": folders, "--profile": profiles})
    environment = {
        VARIABLES[key]: str(value.resolve() if isinstance(value, Path) else value)
        for key, value in settings.items()
        if value is not None
    }
    if config is not None:
        environment["OFFLOAD_CONFIG"] = str(check_config(config).resolve())
    if folders:
        environment["OFFLOAD_NVME"] = os.pathsep.join(str(folder.resolve()) for folder in folders)
    if profiles:
        environment["OFFLOAD_PROFILE"] = os.pathsep.join(str(file.resolve()) for file in profiles)
    return Job(script, arguments, environment, auto)


def check_config(path: Path) -> Path:
    """Refuse what is no configuration before the script runs."""
    from offload.deepspeed_config.recipe import recipe_of

    if not path.is_file():
        raise click.BadParameter(
            f"{path}: expected a DeepSpeed file, got nothing there.", param_hint="--config"
        )
    try:
        recipe_of(path)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error
    return path


def check_separators(given: Mapping[str, Sequence[Path]]) -> None:
    """Refuse names that cannot be told apart in one environment variable."""
    for option, paths in given.items():
        for path in paths:
            if os.pathsep in str(path.resolve()):
                raise click.BadParameter(
                    f"{path}: a name may not hold {os.pathsep!r}.", param_hint=option
                )


def execute(job: Job) -> None:
    """Run the script as `python script.py arguments` would, in this process."""
    os.environ.update(job.environment)
    module = types.ModuleType("__main__")
    module.__file__ = str(job.script)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [str(job.script), *job.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(job.script.resolve().parent)
    code = compile(job.script.read_bytes(), str(job.script), "exec", dont_inherit=True)
    with contextlib.ExitStack() as around:
        if job.auto:
            from offload.integrations.auto import AutoOffload

            say = partial(_say, NAME)
            around.enter_context(AutoOffload(say))
        exec(code, module.__dict__)


def _say(name: str, line: str) -> None:
    click.echo(f"{name}: {' '.join(line.split())}", err=True)


def report(error: BaseException, name: str = NAME) -> int:
    """Tell of an error that ended the script, as the interpreter would; return the exit status.

    A setting that the engine refuses is a mistake in the command line, not in the script: one line.
    """
    if isinstance(error, ConfigError | BudgetError | StoreError):
        _say(name, str(error))
        return 1 if isinstance(error, StoreError) else shell.IMPOSSIBLE
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    sys.excepthook(type(error), error.with_traceback(own), own)
    return shell.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def show_log() -> None:
    """Print what the engine says of itself, unless the script has set up logging of its own."""
    stream = logging.StreamHandler()
    stream.setFormatter(logging.Formatter("%(message)s"))
    stream.addFilter(lambda record: not logging.root.handlers)
    for name in ("offload", "aio"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(stream)


def main() -> None:
    # Torch's threads would else spin between products, on the processors of the updates.  The
    # library reads this when it is loaded, so nothing above may import torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    job: Job = shell.parse(command)
    shell.terminate_as_exception()
    show_log()
    try:
        execute(job)
    except SystemExit:
        raise
    except BaseException as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()
