"""What does durability cost a training step, and what does a checkpoint that is saved meanwhile?

    python benchmarks/bench_durability.py --folder RUNS [--rounds 3] [--held 200] [--save]

`none` writes in place, and so waits for the norm before it updates anything (overlap=hold).
"process, held" does the same on two sides and with commits: their ratio is the cost of durability.
"process" updates during backward, as it does by default; `none` cannot, which is a cost of `none`.
`step` adds a flush of the data and one of the record behind the next forward.

A checkpoint on the store's file system links files, one elsewhere (--other) is copied behind
training.  Its stall is measured against steps of the same process that no checkpoint is near:
over the steps that began while it was being written, and over the three that follow a save,
in which new files take the place of the saved ones.
"""

from __future__ import annotations

import datetime
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
from meters import describe_machine, keep_result, num_cpus, told_settings
from step_model import Shape
from step_run import Launcher, Run

HERE = Path(__file__).resolve().parent
MODES = {
    "none": {"durability": "none"},
    "process, held": {"durability": "process", "overlap": "hold"},
    "step, held": {"durability": "step", "overlap": "hold"},
    "process": {"durability": "process"},
    "step": {"durability": "step"},
}
RATIOS = (
    ("process, held", "none"), ("step, held", "none"), ("process", "none"), ("step", "process"),
)  # fmt: skip
WANTED = {"process, held / none": 1.03, "links": 0.05}
AFTER = 3  # steps after a save that belong to it
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: Path
    other: Path
    parts: str
    rounds: int
    steps: int
    warmup: int
    saves: int
    width: int
    depth: int
    vocab: int
    threads: int
    held: int
    host_memory: str
    device_memory: str
    save: bool

    @property
    def shape(self) -> Shape:
        return Shape(self.width, self.depth, self.vocab)

    @property
    def every(self) -> int:
        """Steps from one save to the next: as many without one as with one."""
        return 2 * AFTER

    def job(self, steps: int, options: Mapping[str, str]) -> dict[str, Any]:
        budgets = {"host_memory": self.host_memory, "device_memory": self.device_memory}
        return {
            "engine": "offload", "shape": asdict(self.shape), "steps": steps,
            "threads": self.threads, "options": {**budgets, **options},
        }  # fmt: skip

    def launcher(self, folder: Path, script: str) -> Launcher:
        return Launcher(
            folder=folder, peer_python="", peer_extensions="",
            held_bytes_per_s=self.held * 10**6, timeout_s=600, script=script,
        )  # fmt: skip


def checked(run: Run, name: str, index: int) -> Run:
    if run.error:
        raise click.ClickException(f"{name}: {run.error}")
    click.echo(f"round {index} {name}: {told_steps(run)}", err=True)
    return run


def told_steps(run: Run) -> str:
    marks = {True: "*", False: ""}
    return " ".join(
        f"{step['seconds']:.2f}{marks[step.get('saving', False)]}" for step in run.steps
    )


def durability(settings: Settings, folder: Path) -> Iterator[Row]:
    """Every mode once a round, each in a process of its own."""
    launcher = settings.launcher(folder, "step_child.py")
    launcher.prepare()
    for index in range(settings.rounds):
        for name, options in MODES.items():
            job = settings.job(settings.warmup + settings.steps, options)
            run = checked(launcher.run(job, index), name, index)
            measured = run.steps[settings.warmup :]
            seconds = [step["seconds"] for step in measured]
            drain = run.events["drained"]["seconds"]
            yield {
                "round": index, "mode": name, "step_s": median(seconds), "mean_s": mean(seconds),
                "close_s": drain, "write_bytes": median(step["write_bytes"] for step in measured),
                "probe": run.probe, "loss": measured[-1]["loss"],
            }  # fmt: skip


def checkpoints(settings: Settings, folder: Path) -> Iterator[Row]:
    """A process a round for each kind of target."""
    launcher = settings.launcher(folder, "saving_child.py")
    launcher.prepare()
    for index in range(settings.rounds):
        for name, parent in (("links", folder), ("copy", settings.other)):
            steps = settings.every * (settings.saves + 1)
            with tempfile.TemporaryDirectory(prefix="bench-durability-", dir=parent) as target:
                options = {"target": target, "every": str(settings.every)}
                run = launcher.run(settings.job(steps, options), index)
            yield {"round": index, "target": name, **stalls(checked(run, name, index))}


def stalls(run: Run) -> Row:
    """What saving cost, relative to the steps that are far from it; the first save warms up."""
    steps = [step for step in run.steps if step["index"] >= 4 * AFTER]
    plain = median(step["seconds"] for step in steps if step["since"] >= AFTER)
    during = [step["seconds"] for step in steps if step["saving"]]
    near = [step["seconds"] for step in steps if step["since"] < AFTER]
    calls = [step["call_s"] for step in steps if step["since"] == 0]
    return {
        "plain_s": plain, "call_s": median(calls), "steps_during": len(during) / len(calls),
        "during": mean(during) / plain - 1 if during else 0.0, "near": mean(near) / plain - 1,
        "near_median": median(near) / plain - 1,
    }  # fmt: skip


def by_round(rows: list[Row], mode: str) -> dict[int, float]:
    return {row["round"]: row["step_s"] for row in rows if row["mode"] == mode}


def ratios(rows: list[Row]) -> Iterator[Row]:
    for mode, base in RATIOS:
        mine, theirs = by_round(rows, mode), by_round(rows, base)
        found = [mine[index] / theirs[index] for index in mine]
        yield {
            "what": f"{mode} / {base}", "ratio": median(found), "least": min(found),
            "most": max(found),
        }  # fmt: skip


def report_durability(rows: list[Row]) -> list[Row]:
    click.echo("| mode | step s | mean s | close s | GB written |\n| --- | --- | --- | --- | --- |")
    for mode in MODES:
        mine = [row for row in rows if row["mode"] == mode]
        cells = [median(row[key] for row in mine) for key in ("step_s", "mean_s", "close_s")]
        written = median(row["write_bytes"] for row in mine) / 1e9
        click.echo(f"| {mode} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {written:.2f} |")
    summary = list(ratios(rows))
    for row in summary:
        told = f"{row['what']}: {row['ratio']:.3f} ({row['least']:.3f}-{row['most']:.3f})"
        click.echo(judged(told, row["ratio"], WANTED.get(row["what"])))
    return summary


def report_checkpoints(rows: list[Row]) -> list[Row]:
    summary = []
    for target in dict.fromkeys(row["target"] for row in rows):
        mine = [row for row in rows if row["target"] == target]
        keys = ("plain_s", "call_s", "steps_during", "during", "near", "near_median")
        row = {"target": target} | {key: median(row[key] for row in mine) for key in keys}
        told = (
            f"checkpoint by {target}: steps while it is written {row['during']:+.1%}"
            f" ({row['steps_during']:.1f} steps of {row['plain_s']:.2f} s), the {AFTER} steps after"
            f" a save {row['near']:+.1%} (median {row['near_median']:+.1%}), the call itself"
            f" {row['call_s'] * 1e3:.1f} ms"
        )
        click.echo(judged(told, row["during"], WANTED.get(target)))
        summary.append(row)
    return summary


def judged(told: str, value: float, wanted: float | None) -> str:
    if wanted is None:
        return f"     {told}"
    return f"{'ok  ' if value <= wanted else 'MISS'} {told}, wanted {wanted}"


PARTS: dict[str, tuple[Callable[..., Iterator[Row]], Callable[[list[Row]], list[Row]]]] = {
    "durability": (durability, report_durability),
    "checkpoints": (checkpoints, report_checkpoints),
}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--other", type=click.Path(path_type=Path), default=Path("/dev/shm"),
              help="Another file system, for copies.")  # fmt: skip
@click.option("--parts", default=",".join(PARTS))
@click.option("--rounds", default=3)
@click.option("--steps", default=8, help="Measured steps of a mode in a round.")
@click.option("--warmup", default=4, help="Before them: all sides are written twice.")
@click.option("--saves", default=5, help="Of one process; the first is not counted.")
@click.option("--width", default=1024)
@click.option("--depth", default=8)
@click.option("--vocab", default=8192)
@click.option("--threads", type=int, default=num_cpus, show_default="CPUs allowed")
@click.option("--held", default=0, help="Hold the disk at so many MB/s a direction (root).")
@click.option("--host-memory", default="512MiB")
@click.option("--device-memory", default="256MiB")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    click.echo(f"{settings.shape.num_params / 1e6:.1f} M parameters")
    for part in settings.parts.split(","):
        measure, report = PARTS[part]
        folder = settings.folder.resolve() / "bench-durability"
        try:
            rows = list(measure(settings, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        summary = report(rows)
        if settings.save:
            keep(settings, part, {"summary": summary, "rows": rows})


def told(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in told_settings(settings).items() if key != "other"}


def keep(settings: Settings, part: str, figures: Mapping[str, Any]) -> None:
    facts = {
        "command": "benchmarks/bench_durability.py", "date": datetime.date.today().isoformat(),
        "machine": describe_machine(), "settings": told(settings),
        "params": settings.shape.num_params,
    }  # fmt: skip
    click.echo(f"written: {keep_result(part, {**facts, **figures}).name}", err=True)


if __name__ == "__main__":
    main()
