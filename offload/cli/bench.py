"""offload-bench: what this machine's drive can do, and with which setting.

offload-bench io /mnt/nvme
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

import aio
from offload.cli import io_sweep, shell
from offload.cli.machine import file_system
from offload.cli.shell import text

NAME = "offload-bench"


@click.group(NAME, no_args_is_help=False)
def command() -> None:
    """Measure what bounds a training step on this machine."""


@command.command("io")
@click.argument("folder", callback=shell.one_folder)
@click.option(
    "--size", callback=shell.size, default="2GiB", show_default=True, help="Of the test file."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="For each setting.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the samples as JSON.")
def io(*, folder: Path, size: int, seconds: float, as_json: bool) -> None:
    """Sweep backend, block size and depth for reads, writes and both in FOLDER.

    The test file is written once, has no name and is gone when this ends, however it ends.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise click.ClickException(
            f"{folder}: expected {text(size)} of free space, got {text(free)}."
            " Free some, or give a smaller --size."
        )
    probe = aio.probe(folder)
    backends = working_backends(probe)
    try:
        with io_sweep.Target(folder, size) as target:
            samples = sweep(target, backends, seconds)
            direct = target.file.direct
    except OSError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(as_record(folder, direct, samples), indent=1))
        return
    how = "O_DIRECT" if direct else "no O_DIRECT: this is the page cache, not the drive"
    click.echo(f"{folder}: {file_system(folder)}, {how}; GB/s = 10^9 bytes per second")
    for operation in io_sweep.OPERATIONS:
        click.echo(table([item for item in samples if item.setting.operation == operation]))


def working_backends(probe: aio.Probe) -> tuple[str, ...]:
    return tuple(name for name, problem in probe.backends.items() if problem is None)


def sweep(
    target: io_sweep.Target, backends: Sequence[str], seconds: float
) -> list[io_sweep.Sample]:
    points = io_sweep.settings(tuple(backends))
    with tqdm(total=1 + len(points), unit="setting", leave=False, desc="writing the file") as bar:
        target.fill()
        bar.update()
        samples = []
        for point in points:
            bar.set_description(f"{point.operation}, {point.backend}")
            samples.append(io_sweep.measure(target, point, seconds=seconds))
            bar.update()
    return samples


def best(samples: Sequence[io_sweep.Sample]) -> io_sweep.Sample:
    return max(samples, key=lambda sample: sample.bytes_per_s)


def table(samples: Sequence[io_sweep.Sample]) -> str:
    """One operation: a row for each backend and block size, a column for each depth."""
    found = {
        (s.setting.backend, s.setting.block_bytes, s.setting.depth): s.bytes_per_s for s in samples
    }
    top = best(samples)
    depths = "".join(f"{f'depth {depth}':>10}" for depth in io_sweep.DEPTHS)
    lines = ["", f"{top.setting.operation:8}{'block':>10}{depths}"]
    for backend, block in dict.fromkeys(key[:2] for key in found):
        cells = "".join(f"{found[backend, block, d] / 1e9:10.2f}" for d in io_sweep.DEPTHS)
        lines.append(f"{backend:8}{text(block):>10}{cells}")
    lines.append(
        f"best: {top.bytes_per_s / 1e9:.2f} GB/s with {top.setting.backend},"
        f" blocks of {text(top.setting.block_bytes)}, depth {top.setting.depth}"
    )
    return "\n".join(lines)


def as_record(folder: Path, direct: bool, samples: Sequence[io_sweep.Sample]) -> dict[str, Any]:
    def row(sample: io_sweep.Sample) -> dict[str, Any]:
        return {**asdict(sample.setting), "bytes_per_s": round(sample.bytes_per_s)}

    by_operation = {
        operation: [item for item in samples if item.setting.operation == operation]
        for operation in io_sweep.OPERATIONS
    }
    return {
        "folder": str(folder),
        "file_system": file_system(folder),
        "direct": direct,
        "samples": [row(sample) for sample in samples],
        "best": {operation: row(best(found)) for operation, found in by_operation.items()},
    }


def main() -> None:
    shell.terminate_as_exception()
    shell.parse(command)


if __name__ == "__main__":
    main()
