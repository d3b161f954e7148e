"""How the commands speak: one line for a mistake, and a status that scripts can read.

0 done    1 failed    2 asked for something impossible    130 interrupted    143 terminated
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from offload.errors import ConfigError, OffloadError, StoreError

IMPOSSIBLE = 2
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def parse(command: click.Command, arguments: Sequence[str] | None = None) -> Any:
    """Run `command` and return its result; a mistake in `arguments` is one line and status 2."""
    name = command.name or "offload"
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        refuse(name, error.format_message())
    except click.Abort:
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        if not _output_lost():
            raise
        click.echo(f"{name}: standard output cannot be written: {error.strerror}.", err=True)
        raise SystemExit(1) from None
    if isinstance(result, int):  # --help and its like
        raise SystemExit(result)
    return result


def _output_lost() -> bool:
    """Tell whether stdout takes nothing more; if so, drop what is left, which exit would write."""
    try:
        click.echo()  # a failed write leaves no other trace
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


def refuse(name: str, message: str) -> NoReturn:
    """Say what is wrong in one line on stderr and leave with status 2."""
    click.echo(f"{name}: {' '.join(message.split())}", err=True)
    raise SystemExit(IMPOSSIBLE)


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Tell of an error that the library raises on purpose in one line; its status is 1 or 2."""
    try:
        yield
    except OffloadError as error:
        name = click.get_current_context().command_path
        click.echo(f"{name}: {' '.join(str(error).split())}", err=True)
        raise SystemExit(1 if isinstance(error, StoreError) else IMPOSSIBLE) from None


def terminate_as_exception() -> None:
    """Make SIGTERM unwind the stack, so that `finally`, `with` and atexit do their work.

    A second one is ignored: it would interrupt the work of the first.
    """

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, leave)


def folder(value: str) -> Path:
    """An existing folder that this process may write to; raises BadParameter."""
    path = Path(value)
    if not path.exists():
        raise click.BadParameter(f"{path}: expected a folder, got nothing there. Create it first.")
    if not path.is_dir():
        raise click.BadParameter(f"{path}: expected a folder, got a file. Name its folder.")
    if not os.access(path, os.W_OK | os.X_OK):
        raise click.BadParameter(
            f"{path}: expected a folder that may be written, got a read-only one."
            " Change its owner or mode, or name another."
        )
    return path


def one_folder(context: click.Context, param: click.Parameter, value: str) -> Path:
    return folder(value)


def folders(context: click.Context, param: click.Parameter, value: Sequence[str]) -> list[Path]:
    return [folder(item) for item in value]


def size(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes, written as 2147483648, 2GiB or 2GB."""
    if value is None:
        return None
    from offload.config import parse_bytes

    try:
        return parse_bytes(value, param.opts[0])
    except ConfigError as error:
        raise click.BadParameter(str(error).partition(": ")[2]) from None


def number(context: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """What a range of click lets through although it lies in none: not a number."""
    if value is not None and math.isnan(value):
        raise click.BadParameter(f"expected a number, got {value}.")
    return value


def text(num_bytes: float) -> str:
    """2147483648 -> '2.0 GiB'."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
