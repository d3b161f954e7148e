"""offload-bench update: what the update kernels reach here, beside what the memory allows."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from offload import kernels
from offload.cli import io_plot, update_sweep
from offload.cli.update_memory import PAUSE_S, Streams, Timing
from offload.cli.update_sweep import Rounds
from offload.threads import available_cpus

STAGGER_BYTES = 192  # streams of a real model do not all start on a page
NO_LIMIT = "no limit: a C compiler (cc) is needed to measure what the memory allows."


@dataclass(frozen=True)
class Table:
    """All jobs with one number of threads."""

    threads: int
    rows: tuple[dict[str, Any], ...]


@click.command("update")
@click.option(
    "--num-elems", type=click.IntRange(min=1 << 10), default=8 << 20, show_default=True,
    help="Parameters that one update goes over; 22 bytes of memory each.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--threads", type=click.IntRange(min=1), multiple=True, help="Default: one, and all processors."
)
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print the rates as JSON.")
def command(
    *, num_elems: int, rounds: int, threads: tuple[int, ...], picture: Path | None, as_json: bool
) -> None:
    """Time the fused update of every instruction set beside the same traffic without arithmetic."""
    counts = sorted(set(threads)) or sorted({1, available_cpus()})
    with limit_or_none() as library:
        tables = [measure(library, num_elems, rounds, count) for count in counts]
        notes = [] if library else [NO_LIMIT]
    if as_json:
        values = [{"threads": table.threads, "rows": list(table.rows)} for table in tables]
        click.echo(json.dumps({"num_elems": num_elems, "rounds": rounds, "tables": values}))
    else:
        click.echo("\n\n".join(report(table) for table in tables))
    if picture is not None:
        problem = draw(picture, tables)
        notes += [problem] if problem else []
    for note in notes:
        click.echo(f"offload-bench: {note}", err=True)


@contextlib.contextmanager
def limit_or_none() -> Iterator[Any]:
    """The compiled limit, or None where nothing can be compiled."""
    with contextlib.ExitStack() as stack:
        library = None
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            library = stack.enter_context(update_sweep.limit_library())
        yield library


def measure(library: Any, num_elems: int, rounds: int, num_threads: int) -> Table:
    """All jobs `rounds` times after a warm-up; the variant in use stays what it was."""
    before = kernels.variant()
    at = Streams(num_elems, STAGGER_BYTES)
    at.reset()
    found: Rounds = {}
    try:
        with ThreadPoolExecutor(num_threads) as pool, kernels.Threads(num_threads) as threads:
            limits = update_sweep.limit_jobs(library, at, pool) if library else {}
            jobs = limits | update_sweep.our_jobs(at, threads, kernels.supported())
            jobs |= update_sweep.optimizer_jobs(at, threads, kernels.supported()[0])
            total = len(jobs) * (rounds + 1)
            with tqdm(total=total, leave=False, disable=None, desc=f"{num_threads} threads") as bar:
                for index in range(rounds + 1):
                    for name, job in jobs.items():
                        time.sleep(PAUSE_S)
                        timing = Timing.of(job)
                        found.setdefault(name, []).extend([timing] if index else [])
                        bar.update()
    finally:
        kernels.select(before)
    rows = tuple(update_sweep.row_of(found, name, num_elems) for name in found)
    return Table(num_threads, rows)


def report(table: Table) -> str:
    """Rates of every job, and its share of the limit of the same round."""
    head = f"{'GB/s':>8}{'Melem/s':>9}{'slowest':>9}{'fastest':>9}{'of limit':>10}"
    lines = [f"{f'{table.threads} threads':<36}{head}"]
    for row in table.rows:
        rates = [row[f"{which}elems_per_s"] / 1e6 for which in ("", "slowest_", "fastest_")]
        share = "-" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
        lines.append(
            f"{row['job']:<36}{row['bytes_per_s'] / 1e9:8.1f}"
            f"{rates[0]:9.0f}{rates[1]:9.0f}{rates[2]:9.0f}{share:>10}"
        )
    return "\n".join(lines)


def draw(path: Path, tables: Sequence[Table]) -> str | None:
    """A group of bars for each number of threads; return why there is no picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return io_plot.NO_MATPLOTLIB
    figure = Figure(figsize=(5 * len(tables), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tables), sharex=True, squeeze=False)[0]
    for panel, table in zip(panels, tables, strict=True):
        names = [row["job"] for row in table.rows]
        colors = ["0.6" if name.startswith("limit") else "C0" for name in names]
        panel.barh(names, [row["bytes_per_s"] / 1e9 for row in table.rows], color=colors)
        panel.invert_yaxis()
        panel.set_xlabel("GB/s")
        panel.set_title(f"{table.threads} threads")
    figure.savefig(path, dpi=120)
    return None
