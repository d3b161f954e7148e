"""How near to the drive's rate are loading a model, loading a checkpoint, and exporting?

    python benchmarks/bench_load.py --folder RUNS [--rounds 3] [--save]

Each round measures what the drive gives (reads, writes, both at once) and then, in fresh processes,
imports a saved model in bf16 and in fp32.  The limit of an operation is the least time in which
such a drive moves the bytes that the kernel counted for it; `of limit` is limit over time.  What
writes new files (imports, exports) is held against a drive whose writes go to space that is
reserved and was never written; the share of the rate of space written before is shown beside it.
An import is charged with what it takes longer than to open the same store again: pool, threads and
the module are the same in both, and do not grow with the model.  One that is not counted comes
before.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import disk_rate
import torch
from meters import describe_machine, keep_result, num_cpus, told_settings
from safetensors.torch import save_file
from step_model import GPT, Shape

HERE = Path(__file__).resolve().parent
WANTED = 0.8
IMPORTS = 4  # of a process, after one that warms up
MEASURED = ("seconds", "read_bytes", "write_bytes")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REWRITING = ("load_checkpoint",)  # into sides that steps have written
Row = dict[str, Any]
Drive = dict[str, dict[str, float]]  # rates where space is "written", and where it is "fresh"


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: Path
    rounds: int
    width: int
    depth: int
    vocab: int
    threads: int
    host_memory: str
    device_memory: str
    save: bool

    @property
    def shape(self) -> Shape:
        return Shape(self.width, self.depth, self.vocab, seq=128)


def save_sources(settings: Settings, folder: Path) -> dict[str, Path]:
    """A safetensors file of each type; the page cache forgets it."""
    torch.manual_seed(0)
    model = GPT(settings.shape)
    found = {}
    for name, dtype in DTYPES.items():
        found[name] = folder / f"saved-{name}"
        found[name].mkdir()
        path = found[name] / "model.safetensors"
        save_file({key: value.to(dtype) for key, value in model.state_dict().items()}, path)
    return found


def forget(path: Path) -> None:
    """Write a file out and drop its pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def run_child(settings: Settings, source: Path, folder: Path, *, further: bool) -> list[Row]:
    """What one process reports, in order."""
    forget(source / "model.safetensors")
    reader, writer = os.pipe()
    job = {
        "shape": asdict(settings.shape), "source": str(source), "dtype": "bf16",
        "folder": str(folder), "threads": settings.threads,
        "host_memory": settings.host_memory, "device_memory": settings.device_memory,
        "imports": IMPORTS, "further": further,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "load_child.py"), json.dumps(job), str(writer)]
    with subprocess.Popen(command, pass_fds=[writer]) as child:
        os.close(writer)
        with os.fdopen(reader) as lines:
            events = [json.loads(line) for line in lines]
    if child.returncode:
        raise click.ClickException(f"load_child.py ended with status {child.returncode}")
    return events


def judged(events: list[Row], drive: Drive, source: str) -> Iterator[Row]:
    """One row per operation of a child; imports in pairs with the opening of the same store."""
    pairs = zip(
        *([e for e in events if e["event"] == name] for name in ("import", "open")), strict=True
    )
    found = [
        (f"import {source}", {key: imported[key] - opened[key] for key in MEASURED})
        for imported, opened in list(pairs)[1:]
    ]
    found += [(e["event"], e) for e in events if e["event"] not in ("import", "open")]
    for name, event in found:
        moved = (event["read_bytes"], event["write_bytes"])
        written_s = disk_rate.floor_s(*moved, drive["written"])
        limit_s = written_s if name in REWRITING else disk_rate.floor_s(*moved, drive["fresh"])
        figures = {key: event[key] for key in MEASURED}
        yield {
            "operation": name, **figures, "limit_s": limit_s,
            "of_limit": limit_s / event["seconds"], "of_written": written_s / event["seconds"],
        }  # fmt: skip


def drive_rates(probe: Path) -> Drive:
    return {
        "written": disk_rate.rates(probe, 0.6),
        "fresh": disk_rate.fresh_rates(probe, 0.6),
    }


def measure(settings: Settings) -> tuple[list[Row], list[Drive]]:
    """All rounds; everything is removed afterwards."""
    rows, probes = [], []
    with emptied(settings.folder.resolve() / "bench-load") as folder:
        sources = save_sources(settings, folder)
        disk_rate.prepare(folder / "probe")
        for index in range(settings.rounds):
            for name, source in sources.items():
                found = drive_rates(folder / "probe")
                probes.append(found)
                with emptied(folder / "drive") as drive:
                    events = run_child(settings, source, drive, further=name == "bf16")
                rows += [{"round": index, **row} for row in judged(events, found, name)]
                click.echo(f"round {index}, {name}: drive GB/s {told(found)}", err=True)
    return rows, probes


def told(drive: Drive) -> str:
    return "; ".join(
        f"{space} " + ", ".join(f"{way} {rate / 1e9:.2f}" for way, rate in rates.items())
        for space, rates in drive.items()
    )


def summarise(rows: list[Row]) -> list[Row]:
    """Medians by operation, and the range of what was reached."""
    found = []
    for name in dict.fromkeys(row["operation"] for row in rows):
        mine = [row for row in rows if row["operation"] == name]
        keys = ("seconds", "read_bytes", "write_bytes", "limit_s", "of_limit", "of_written")
        summary = {key: median(row[key] for row in mine) for key in keys}
        reached = [row["of_limit"] for row in mine]
        found.append({"operation": name, **summary, "least": min(reached), "most": max(reached)})
    return found


def table(rows: list[Row]) -> str:
    lines = ["| operation | s | GB read + written | GB/s | limit s | of limit | of written space |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        read, write = row["read_bytes"] / 1e9, row["write_bytes"] / 1e9
        lines.append(
            f"| {row['operation']} | {row['seconds']:.2f} | {read:.2f} + {write:.2f}"
            f" | {(read + write) / row['seconds']:.2f} | {row['limit_s']:.2f}"
            f" | {row['of_limit']:.2f} ({row['least']:.2f}-{row['most']:.2f})"
            f" | {row['of_written']:.2f} |"
        )
    return "\n".join(lines)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--rounds", default=3)
@click.option("--width", default=2048)
@click.option("--depth", default=5)
@click.option("--vocab", default=8192)
@click.option("--threads", type=int, default=num_cpus, show_default="CPUs allowed")
@click.option("--host-memory", default="512MiB")
@click.option("--device-memory", default="512MiB")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    settings.folder.mkdir(parents=True, exist_ok=True)
    rows, probes = measure(settings)
    summary = summarise(rows)
    click.echo(f"{settings.shape.num_params / 1e6:.1f} M parameters\n{table(summary)}")
    for row in summary:
        if not row["operation"].startswith("export"):
            sign = "ok  " if row["of_limit"] >= WANTED else "MISS"
            click.echo(f"{sign} {row['operation']}: {row['of_limit']:.2f}, wanted {WANTED}")
    if settings.save:
        result = {
            "command": "benchmarks/bench_load.py", "date": datetime.date.today().isoformat(),
            "machine": describe_machine(), "settings": told_settings(settings),
            "params": settings.shape.num_params, "drive": probes, "summary": summary, "rows": rows,
        }  # fmt: skip
        path = keep_result("load", result)
        click.echo(f"written: {path.name}")


if __name__ == "__main__":
    main()
