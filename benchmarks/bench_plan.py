"""How near is what `offload plan` says before a run to what the run then takes?

    python benchmarks/bench_plan.py [--folder RUNS] [--steps 6] [--rounds 1] [--save]

Five runs that differ in size, budgets, format of state, micro-steps and order.  Each is planned by
the command, in a process of its own, and then trained for real in another one.  The drive is
measured before by `offload-bench io`, as its user would; the plan measures the processors itself.
Wanted: bytes of host, device and disk within 10 %, the time of a step within 25 %.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
from meters import describe_machine, keep_result, num_cpus, result_path, told_settings

HERE = Path(__file__).resolve().parent
WANTED = {"host": 0.1, "device": 0.1, "disk": 0.1, "moved": 0.1, "seconds": 0.25}
WORDS = {
    "host": "host MB", "device": "device MB", "disk": "disk MB", "moved": "moved MB a step",
    "seconds": "step s",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run; `options` are those of the command and of the engine."""

    name: str
    model: str
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    seq: int = 256

    def command(self) -> list[str]:
        """The options as the command takes them."""
        names = {"gradient_accumulation_steps": "micro_steps"}
        told = [f"plan_models:{self.model}", "--tokens", str(self.tokens), "--seq", str(self.seq)]
        if self.model == "checkpointed":
            told.append("--checkpointing")
        for key, value in self.options.items():
            told += [f"--{names.get(key, key).replace('_', '-')}", str(value)]
        return told


CASES = (
    Case("state on disk", "medium", 256, {"host_memory": "192MiB", "placement": "disk"}),
    Case("state in memory", "medium", 512, {"host_memory": "768MiB"}),
    Case(
        "bf16 state, larger, gradients spilled", "large", 256,
        {"host_memory": "96MiB", "state_dtype": "bf16", "placement": "disk"},
    ),
    Case(
        "4 micro-steps, unit by unit", "checkpointed", 1024,
        {"host_memory": "256MiB", "gradient_accumulation_steps": 4, "order": "layer"},
    ),
    Case(
        "8-bit state, 2 micro-steps, in place", "small", 1024,
        {
            "host_memory": "192MiB", "state_dtype": "int8", "gradient_accumulation_steps": 2,
            "durability": "none",
        },
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: str
    steps: int
    warm_up: int
    rounds: int
    threads: int
    probe_size: str
    profile: str | None
    save: bool
    theme: str


def environment(settings: Settings) -> dict[str, str]:
    """As many threads in the plan as in the run."""
    return {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}


def predicted(case: Case, folder: Path, settings: Settings) -> dict[str, Any]:
    """What the command says."""
    done = subprocess.run(
        [sys.executable, "-m", "offload.cli.main", "plan", *case.command(), "--nvme", str(folder),
         "--json"],
        cwd=HERE, env=environment(settings), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return {
        "host": found["host"]["total"], "device": found["device"]["at_work"],
        "disk": found["disk"]["total"], "moved": found["step"]["read"] + found["step"]["written"],
        "seconds": found["step"]["seconds"], "by": found["step"]["by"],
        "terms": found["step"]["terms"], "speeds": found["speeds"],
    }  # fmt: skip


def measured(case: Case, folder: Path, settings: Settings) -> dict[str, Any]:
    """What a run takes; its own count is in `terms`."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(dir=folder, prefix="store-") as store:
        job = {
            "model": case.model, "folder": store, "tokens": case.tokens, "seq": case.seq,
            "warm_up": settings.warm_up, "steps": settings.steps,
            "settings": {**case.options, "profile": str(folder)},
        }  # fmt: skip
        child = subprocess.Popen(
            [sys.executable, str(HERE / "plan_child.py"), json.dumps(job), str(write_end)],
            pass_fds=[write_end],
            env=environment(settings),
        )
        os.close(write_end)
        with os.fdopen(read_end) as report:
            text = report.read()
        if child.wait():
            raise click.ClickException(f"{case.name}: the run failed with {child.returncode}.")
    found: dict[str, Any] = json.loads(text)
    return {**found, "moved": found["read"] + found["written"]}


def row_of(case: Case, rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds, and the ratio of measured to predicted."""
    row: dict[str, Any] = {"name": case.name}
    for key in WANTED:
        told = median(plan[key] for plan, _ in rounds)
        found = median(run[key] for _, run in rounds)
        row[key] = {"predicted": told, "measured": found, "ratio": found / told}
    row["by"] = rounds[-1][0]["by"]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: predicted / measured / ratio for each figure."""
    head = ["run", *(f"{WORDS[key]}: plan, run, ratio" for key in WANTED), "bound by"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [row["name"]]
        for key, within in WANTED.items():
            scale, digits = (1.0, 2) if key == "seconds" else (1e6, 1)
            each, ratio = row[key], row[key]["ratio"]
            miss = "" if abs(ratio - 1) <= within else " MISS"
            cells.append(
                f"{each['predicted'] / scale:.{digits}f}, {each['measured'] / scale:.{digits}f},"
                f" {ratio:.2f}{miss}"
            )
        lines.append(f"| {' | '.join([*cells, row['by']])} |")
    return "\n".join(lines)


def probe_drive(folder: Path, size: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "offload.cli.bench", "io", str(folder), "--size", size],
        stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", default=".", help="On the disk under test.")
@click.option("--steps", default=6, help="That are counted.")
@click.option("--warm-up", default=3, help="Steps before them.")
@click.option("--rounds", default=1)
@click.option("--threads", default=num_cpus(), help="Of torch, in the plan and in the run.")
@click.option("--probe-size", default="256MiB", help="Of the file that measures the drive.")
@click.option("--profile", type=click.Path(exists=True), help="Of this drive, not to measure it.")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
@click.option("--theme", default="plan", help="First word of the result file.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {c.name: [] for c in CASES}
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix=".plan-") as path:
        folder, start = Path(path).resolve(), time.perf_counter()
        if settings.profile is None:
            probe_drive(folder, settings.probe_size)
        else:
            shutil.copy(settings.profile, folder / "offload.profile.json")
        for _ in range(settings.rounds):
            for case in CASES:
                pair = predicted(case, folder, settings), measured(case, folder, settings)
                found[case.name].append(pair)
                done = time.perf_counter() - start
                click.echo(
                    f"{done:6.1f} s  {case.name}: planned {pair[0]['seconds']:.3f} s, took"
                    f" {pair[1]['seconds']:.3f} s", err=True,
                )  # fmt: skip
                if settings.save:  # what there is, should the time not suffice
                    keep(settings, found)
    rows = rows_of(found)
    click.echo(table(rows))
    misses = sum(
        abs(row[key]["ratio"] - 1) > within for row in rows for key, within in WANTED.items()
    )
    click.echo(f"{'ok  ' if not misses else 'MISS'} {misses} of {len(WANTED) * len(rows)} outside")
    if settings.save:
        click.echo(f"\nwritten: {' and '.join(map(str, keep(settings, found)))}")


def rows_of(found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]) -> list[dict[str, Any]]:
    """A row for each run that was made."""
    return [row_of(case, found[case.name]) for case in CASES if found[case.name]]


def keep(settings: Settings, found: dict[str, Any]) -> tuple[Path, Path]:
    """Write the result as JSON and as a page."""
    rows = rows_of(found)
    result = {
        "machine": describe_machine(), "settings": told_settings(settings), "rows": rows,
        "cases": [case.__dict__ for case in CASES], "rounds": found,
    }  # fmt: skip
    page = result_path(settings.theme, ".md")
    page.write_text(f"# {page.stem}\n\n{_head(result)}\n\n{table(rows)}\n")
    return keep_result(settings.theme, result), page


def _head(result: dict[str, Any]) -> str:
    return (
        f"- command: benchmarks/bench_plan.py\n- machine: {result['machine']}\n"
        f"- settings: {result['settings']}\n- each cell: by `offload plan`, by the run (median of"
        " its steps), the second over the first\n"
        f"- CPU time of others during a step: {_foreign(result):.0%} of the machine (median)"
    )


def _foreign(result: dict[str, Any]) -> float:
    """Share of the machine that went elsewhere; much of it, and times tell little."""
    runs = [run for rounds in result["rounds"].values() for _, run in rounds]
    return median((run["foreign_s"] + run["steal_s"]) / run["seconds"] for run in runs) / num_cpus()


if __name__ == "__main__":
    main()
