"""How long is a training step, and how far from what bounds it: ours, the peer, plain memory.

    python benchmarks/bench_step.py --peer-python PEER/bin/python [--held 200] [--save]

Engines: torch (everything in memory), offload (ours), deepspeed (ZeRO-3, parameters and optimizer
on NVMe, pipelined) and deepspeed-serial (not pipelined). All train the same bf16 model from the
same weights on the same batches; the run fails if their losses differ. Each engine is a process
of its own; rounds interleave them, and judge medians of per-round figures.
"""

from __future__ import annotations

import datetime
import json
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import step_table
from meters import describe_machine, num_cpus, result_path, told_settings
from step_model import Shape, faster_products
from step_run import DISK_ENGINES, Launcher, Run
from throttle import ThrottleUnavailable

from offload.config import parse_bytes

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    engines: str
    peer_python: str
    peer_extensions: str
    width: int
    depth: int
    vocab: int
    seq: int
    batch: int
    products: str
    checkpointing: bool
    clip: float
    steps: int
    warmup: int
    rounds: int
    threads: int
    held: int
    folder: Path
    host_memory: str
    device_memory: str
    settings: tuple[str, ...]
    sub_group_size: int
    buffer_count: int
    max_live: int
    timeout: float
    cap: str
    as_json: bool
    save: bool
    theme: str

    def shape(self) -> Shape:
        shape = Shape(self.width, self.depth, self.vocab, self.seq, self.batch)
        products = faster_products(shape) if self.products == "auto" else self.products
        return Shape(**{**asdict(shape), "products": products, "checkpointing": self.checkpointing})

    def engine_options(self, engine: str) -> dict[str, Any]:
        if engine.startswith("offload"):
            host = engine.partition("@")[2] or self.host_memory
            budgets = {"host_memory": host, "device_memory": self.device_memory}
            return budgets | dict(setting.split("=", 1) for setting in self.settings)
        if engine.startswith("deepspeed"):
            return {
                "sub_group_size": self.sub_group_size,
                "buffer_count": self.buffer_count,
                "max_live": self.max_live,
                "pipeline": engine == "deepspeed",
            }
        return {}

    def job(self, engine: str, shape: Shape) -> dict[str, Any]:
        return {
            "engine": engine.partition("@")[0],
            "label": engine,
            "shape": asdict(shape),
            "steps": self.warmup + self.steps,
            "threads": self.threads,
            "clip": self.clip,
            "options": self.engine_options(engine),
        }


def chosen_engines(settings: Settings) -> list[str]:
    """The engines asked for, without the peer where it is not installed (said, not silent)."""
    known = ("torch", *DISK_ENGINES)
    names = settings.engines.split(",")
    if unknown := [name for name in names if name.partition("@")[0] not in known]:
        raise click.UsageError(
            f"unknown engine {unknown[0]!r}: expected some of {', '.join(known)}, or"
            " offload@SIZE for another host budget"
        )
    if not Path(settings.peer_python).is_file():
        for name in names:
            if name.startswith("deepspeed"):
                click.echo(f"SKIPPED {name}: no --peer-python {settings.peer_python!r}", err=True)
        names = [name for name in names if not name.startswith("deepspeed")]
    return names


def progress(run: Run, warmup: int) -> None:
    """One line on stderr per child, so that a long run can be judged while it lasts."""
    if run.error:
        click.echo(f"round {run.round} {run.engine}: FAILED {run.error}", err=True)
        return
    steps = " ".join(f"{step['seconds']:.2f}" for step in run.steps[warmup:])
    rates = " ".join(f"{name} {rate / 1e6:.0f}" for name, rate in run.probe.items())
    disk = f"; disk MB/s {rates}" if rates else ""
    click.echo(f"round {run.round} {run.engine}: steps s {steps}{disk}", err=True)


def run_rounds(settings: Settings, shape: Shape) -> list[Run]:
    """Every engine once per round; all files are removed whatever happens."""
    folder = settings.folder.resolve() / "bench-step"
    launcher = Launcher(
        folder=folder,
        peer_python=settings.peer_python,
        peer_extensions=settings.peer_extensions,
        held_bytes_per_s=settings.held * 10**6,
        timeout_s=settings.timeout,
        cap_bytes=parse_bytes(settings.cap, "cap") if settings.cap else 0,
    )
    engines = chosen_engines(settings)
    runs = []
    try:
        launcher.prepare()
        for index in range(settings.rounds):
            for engine in engines:
                run = launcher.run(settings.job(engine, shape), index)
                progress(run, settings.warmup)
                runs.append(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return runs


def told_facts(settings: Settings, shape: Shape, runs: list[Run]) -> dict[str, Any]:
    """What a reader needs to repeat the run; paths of this machine are left out."""
    options = {**told_settings(settings), "products": shape.products}
    versions = {
        run.engine: run.events["imported"]["version"] for run in runs if "imported" in run.events
    }
    return {
        "command": "benchmarks/bench_step.py",
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": versions,
        "settings": options,
        "params": shape.num_params,
        "tokens": shape.tokens,
    }


def result_stem(settings: Settings) -> Path:
    theme = settings.theme or ("step" + (f"-held{settings.held}" if settings.held else ""))
    return result_path(theme, "")


@click.command(help=__doc__)
@click.option(
    "--engines",
    default="torch,offload,deepspeed",
    show_default=True,
    help="offload@1GiB: ours with another host budget.",
)
@click.option("--peer-python", default="", help="Interpreter with DeepSpeed; skipped without.")
@click.option(
    "--peer-extensions",
    envvar="TORCH_EXTENSIONS_DIR",
    default="",
    help="Folder of the peer's compiled operators (TORCH_EXTENSIONS_DIR); compiled there once.",
)
@click.option("--width", default=1024, show_default=True)
@click.option("--depth", default=8, show_default=True)
@click.option("--vocab", default=8192, show_default=True)
@click.option("--seq", default=256, show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--products", type=click.Choice(["auto", "bf16", "fp32"]), default="auto")
@click.option("--checkpointing", is_flag=True)
@click.option("--clip", default=0.0, show_default=True, help="Greatest gradient norm, 0: none.")
@click.option("--steps", default=8, show_default=True, help="Measured steps per round.")
@click.option("--warmup", default=3, show_default=True, help="Steps before them.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", type=int, default=num_cpus, show_default="CPUs allowed")
@click.option("--held", default=0, help="Hold reads and writes at this many MB/s each (root).")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--host-memory", default="512MiB", show_default=True)
@click.option("--device-memory", default="256MiB", show_default=True)
@click.option("--set", "settings", multiple=True, help="Ours: any text setting, overlap=hold.")
@click.option("--sub-group-size", default=20_000_000, show_default=True, help="DeepSpeed's.")
@click.option("--buffer-count", default=12, show_default=True, help="DeepSpeed's.")
@click.option("--max-live", default=100_000_000, show_default=True, help="DeepSpeed's.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds a child may take.")
@click.option("--cap", default="", help="Memory of each process, at most (cgroup, root).")
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON instead of the table.")
@click.option("--save", is_flag=True, help="Write benchmarks/results/THEME-HARDWARE-MONTH.")
@click.option("--theme", default="", help="Name of the result files; default step[-heldN].")
def main(**options: Any) -> None:
    settings = Settings(**options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is removed
    shape = settings.shape()
    try:
        runs = run_rounds(settings, shape)
    except ThrottleUnavailable as error:
        raise click.ClickException(str(error)) from error
    terms = step_table.Terms(shape.num_params, settings.warmup, num_cpus())
    rows, agree = step_table.summarise(runs, terms)
    facts = told_facts(settings, shape, runs)
    if settings.as_json:
        click.echo(json.dumps({**facts, "rows": rows}))
    else:
        click.echo(f"{shape.num_params / 1e6:.1f} M parameters, {shape.tokens} tokens a step, ")
        click.echo(f"{shape.products} products, {settings.threads} threads, held {settings.held}\n")
        click.echo(step_table.markdown(rows))
    if settings.save:
        for path in step_table.save(result_stem(settings), facts, rows):
            click.echo(f"wrote {path.relative_to(HERE.parent)}", err=True)
    if not agree:
        click.echo(f"LOSSES DIFFER by more than {terms.loss_tolerance}", err=True)
    if not agree or any(run.error for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
