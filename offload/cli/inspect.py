"""offload inspect: the stores and checkpoints in a directory, whether they are whole, whose."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from offload.cli import shell

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("inspect")
@click.argument("directories", nargs=-1, required=True, type=_DIRECTORY, metavar="DIR...")
@click.option("--verify", is_flag=True, help="Read everything and compare all checksums.")
@click.option("--reclaim", is_flag=True, help="Remove what dead jobs left and nobody can use.")
def command(*, directories: Sequence[Path], verify: bool, reclaim: bool) -> None:
    """List the stores and checkpoints in DIR: generation, owner, sizes, left-overs of dead jobs.

    DIR: a folder given as --nvme (all of them, where a store is on several drives), a directory of
    checkpoints, or one checkpoint.  The status is 1 where something is damaged.  Reads only, unless
    --reclaim is given, and works while a job is running.
    """
    found = damaged = 0
    for lines, problems in (*_stores(directories, verify), *_checkpoints(directories, verify)):
        click.echo("\n".join(lines))
        found += 1
        damaged += problems
    freed = sum(_left_overs(directories, reclaim=reclaim))
    if reclaim:
        freed += _reclaim_stores(directories)
        click.echo(f"{shell.text(freed)} reclaimed")
    if not found:
        click.echo(f"no store and no checkpoint in {', '.join(map(str, directories))}")
    if damaged:
        raise SystemExit(1)


def _stores(directories: Sequence[Path], verify: bool) -> Iterator[tuple[list[str], int]]:
    from offload.store.inspect import find_stores
    from offload.store.inspect import verify as verify_store

    paths = _outermost(directories)
    for report in find_stores(paths):
        lines, problems = [f"store {report}"], len(report.problems)
        if verify and report.record is not None and not problems:
            more = _verified(verify_store(paths, report.name), len(report.record.sides))
            lines += more
            problems = sum(line.startswith("  DAMAGED") for line in more)
        yield lines, problems


def _checkpoints(directories: Sequence[Path], verify: bool) -> Iterator[tuple[list[str], int]]:
    from offload.checkpoint.folder import Found, list_checkpoints, read_latest, read_note
    from offload.checkpoint.load import open_checkpoint
    from offload.errors import StoreError
    from offload.store.inspect import verify_record

    for directory in directories:
        note = read_note(directory)
        found = [Found(directory, note)] if note else list_checkpoints(directory)
        latest = read_latest(directory)
        for item in found:
            lines = _describe(item.path, item.note, is_latest=item.note.tag == latest)
            try:
                checkpoint = open_checkpoint(item)
            except StoreError as error:
                yield [*lines, f"  PROBLEM: {error}"], 1
                continue
            if verify:
                record = checkpoint.record
                units = verify_record((item.path,), checkpoint.manifest, record)
                lines += _verified(units, len(record.sides))
            yield lines, sum(line.startswith("  DAMAGED") for line in lines)


def _describe(path: Path, note: object, *, is_latest: bool) -> list[str]:
    from offload.checkpoint.folder import Note

    assert isinstance(note, Note)
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.saved_ns / 1e9))
    return [
        f"checkpoint {path}{' (latest)' if is_latest else ''}",
        f"  step {note.global_step}, generation {note.generation}, saved {saved}, "
        f"{shell.text(note.num_bytes)}",
    ]


def _verified(units: Iterable[tuple[str, list[str]]], num_units: int) -> list[str]:
    """Read all units behind a progress bar; a line for each problem, or one if there is none."""
    from tqdm import tqdm

    lines = []
    for _, problems in tqdm(units, total=num_units, unit="unit", disable=None, leave=False):
        lines += problems
    unsealed = [line for line in lines if "no checksums" in line]
    damaged = [f"  DAMAGED: {line}" for line in lines if line not in unsealed]
    if not damaged:
        damaged = [f"  verified: {num_units - len(unsealed)} of {num_units} units"]
    return damaged + [f"  not verified: {line}" for line in unsealed]


def _left_overs(directories: Sequence[Path], *, reclaim: bool) -> Iterator[int]:
    """Tell of checkpoints that were never completed; the bytes that went."""
    from offload.checkpoint.folder import left_overs, settle

    for directory in directories:
        for path, num_bytes in left_overs(directory):
            click.echo(f"left-over {path}: {shell.text(num_bytes)}")
        if reclaim:
            yield settle(directory)


def _reclaim_stores(directories: Sequence[Path]) -> int:
    from offload.store.inspect import find_stores
    from offload.store.inspect import reclaim as reclaim_store

    paths = _outermost(directories)
    idle = [report for report in find_stores(paths) if report.holder is None]
    return sum(reclaim_store(paths, report.name) for report in idle if report.reclaimable_bytes)


def _outermost(directories: Sequence[Path]) -> list[Path]:
    """A store's own folder stands for the one that it lies in."""
    outer = [
        path.parent if path.name.startswith("offload-") and (path / "PART").exists() else path
        for path in (directory.absolute() for directory in directories)
    ]
    return list(dict.fromkeys(outer))
