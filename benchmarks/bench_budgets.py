"""What does host memory buy: bytes and time of a step, from the least budget to everything.

    python benchmarks/bench_budgets.py --folder RUNS [--points 6] [--rounds 3] [--held 200] [--save]

The least budget and what everything takes come from the plan; between them lie `--points` budgets,
evenly.  Each round trains at all of them, a process each, in both modes of durability: with
`process` every generation is written, with `none` only what does not stay in memory.
Wanted: our own count within 2 % of the plan, reads that fall to 0, writes at 12 bytes a parameter
(0 with `none`), and a step time that never rises by more than it differs between rounds.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from bench_durability import checked
from meters import describe_machine, keep_result, num_cpus, told_settings
from step_model import Shape, build
from step_run import Launcher

from offload import OffloadEngine
from offload.engine.planning import PlanOnly
from offload.errors import BudgetError
from offload.schedule.plan import Plan

WANTED_OF_PLAN = 0.02
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: Path
    durability: str
    points: int
    rounds: int
    steps: int
    warmup: int
    width: int
    depth: int
    vocab: int
    seq: int
    threads: int
    held: int
    device_memory: str
    save: bool

    @property
    def shape(self) -> Shape:
        return Shape(self.width, self.depth, self.vocab, self.seq)

    def options(self, durability: str, host_memory: int) -> dict[str, Any]:
        return {
            "durability": durability, "host_memory": host_memory, "overlap": "hold",
            "device_memory": self.device_memory,
        }  # fmt: skip

    def job(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "engine": "offload", "shape": asdict(self.shape), "options": options,
            "steps": self.warmup + self.steps, "threads": self.threads,
        }  # fmt: skip


def plan_of(settings: Settings, folder: Path, options: dict[str, Any]) -> Plan:
    """The plan at a budget, without an engine; raises BudgetError."""
    try:
        OffloadEngine(build(settings.shape), nvme_path=folder, plan_only=True, **options)
    except PlanOnly as told:
        return told.plan
    raise AssertionError("plan_only has made an engine")


def budgets(settings: Settings, folder: Path, durability: str) -> list[int]:
    """From the least that works to what everything takes, evenly."""
    most = plan_of(settings, folder, settings.options(durability, 1 << 40)).placement.total_bytes
    try:
        plan_of(settings, folder, settings.options(durability, 1))
    except BudgetError as error:
        least = int(str(error).rpartition("host_memory=")[2].split()[0])
    steps = max(settings.points - 1, 1)
    return [least + (most - least) * index // steps for index in range(settings.points)]


def measure(settings: Settings, folder: Path) -> Iterator[Row]:
    """A process for each budget and mode, round by round."""
    launcher = Launcher(
        folder=folder, peer_python="", peer_extensions="",
        held_bytes_per_s=settings.held * 10**6, timeout_s=600,
    )  # fmt: skip
    launcher.prepare()
    modes = {mode: budgets(settings, folder, mode) for mode in settings.durability.split(",")}
    for index in range(settings.rounds):
        for mode, sizes in modes.items():
            for size in sizes:
                options = settings.options(mode, size)
                traffic = plan_of(settings, folder, options).traffic
                name = f"{mode} {size / 1e6:.0f} MB"
                run = checked(launcher.run(settings.job(options), index), name, index)
                steps = run.steps[settings.warmup :]
                yield {
                    "round": index, "durability": mode, "host_memory": size,
                    "step_s": median(step["seconds"] for step in steps),
                    "read": median(step["counted"]["read_bytes"] for step in steps),
                    "written": median(step["counted"]["write_bytes"] for step in steps),
                    "planned_read": sum(traffic.read.values()),
                    "planned_written": sum(traffic.written.values()),
                    "loss": steps[-1]["loss"], "probe": run.probe,
                }  # fmt: skip


def summarise(rows: list[Row], num_params: int) -> list[Row]:
    """One row a mode and budget: medians over rounds, and how the step time went on."""
    summary: list[Row] = []
    for key in dict.fromkeys((row["durability"], row["host_memory"]) for row in rows):
        mine = [row for row in rows if (row["durability"], row["host_memory"]) == key]
        seconds = sorted(row["step_s"] for row in mine)
        row = {
            "durability": key[0], "host_memory": key[1], "step_s": median(seconds),
            "least_s": seconds[0], "most_s": seconds[-1],
        }  # fmt: skip
        for name in ("read", "written", "planned_read", "planned_written"):
            row[f"{name}_per_param"] = median(each[name] for each in mine) / num_params
        before = summary[-1] if summary and summary[-1]["durability"] == key[0] else None
        row["rise"] = row["step_s"] / before["step_s"] - 1 if before else 0.0
        row["noise"] = max(_spread(row), _spread(before) if before else 0.0)
        summary.append(row)
    return summary


def _spread(row: Row) -> float:
    return (row["most_s"] - row["least_s"]) / row["step_s"]


def misses(summary: list[Row]) -> Iterator[str]:
    """What is not as wanted."""
    for row in summary:
        name = f"{row['durability']} at {row['host_memory'] / 1e6:.0f} MB"
        for what in ("read", "written"):
            found, planned = row[f"{what}_per_param"], row[f"planned_{what}_per_param"]
            if abs(found - planned) > WANTED_OF_PLAN * planned:
                yield f"{name}: {what} {found:.2f} bytes a parameter, planned {planned:.2f}"
        if row["rise"] > row["noise"]:
            yield f"{name}: the step rose by {row['rise']:.1%}, noise {row['noise']:.1%}"


def show(summary: list[Row]) -> None:
    click.echo(
        "| durability | host MB | read B/p | written B/p | step ms (rounds) | rise | noise |"
    )
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for row in summary:
        spread = f"{row['least_s'] * 1e3:.0f}-{row['most_s'] * 1e3:.0f}"
        click.echo(
            f"| {row['durability']} | {row['host_memory'] / 1e6:.0f}"
            f" | {row['read_per_param']:.2f} | {row['written_per_param']:.2f}"
            f" | {row['step_s'] * 1e3:.0f} ({spread})"
            f" | {row['rise']:+.1%} | {row['noise']:.1%} |"
        )


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--durability", default="process,none")
@click.option("--points", default=6, help="Budgets from the least to everything.")
@click.option("--rounds", default=3)
@click.option("--steps", default=6, help="Measured steps at a budget in a round.")
@click.option("--warmup", default=3, help="Before them: all sides are written once.")
@click.option("--width", default=768)
@click.option("--depth", default=6)
@click.option("--vocab", default=4096)
@click.option("--seq", default=256)
@click.option("--threads", type=int, default=num_cpus, show_default="CPUs allowed")
@click.option("--held", default=0, help="Hold the disk at so many MB/s a direction (root).")
@click.option("--device-memory", default="256MiB")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    click.echo(f"{settings.shape.num_params / 1e6:.1f} M parameters")
    folder = settings.folder.resolve() / "bench-budgets"
    try:
        rows = list(measure(settings, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary = summarise(rows, settings.shape.num_params)
    show(summary)
    missed = list(misses(summary))
    for text in missed:
        click.echo(f"MISS {text}")
    if settings.save:
        facts = {
            "command": "benchmarks/bench_budgets.py", "date": datetime.date.today().isoformat(),
            "machine": describe_machine(), "settings": told_settings(settings),
            "params": settings.shape.num_params,
        }  # fmt: skip
        path = keep_result("budgets", {**facts, "summary": summary, "missed": missed, "rows": rows})
        click.echo(f"written: {path.name}", err=True)


if __name__ == "__main__":
    main()
