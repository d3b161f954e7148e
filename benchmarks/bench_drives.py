"""Do two drives of different speed give the sum of their speeds?

    sudo python benchmarks/bench_drives.py [--rates 100,200] [--rounds 5] [--save]

Two loop devices, each with an ext4 of its own, are held at their rates (root, cgroup v1). Every
round reads and writes all units of a store as a training step does, in order, with few in flight:
on the first drive alone, on the second alone, and on both, with the units spread as the engine
spreads them. `of sum` is the rate on both over the sum of the two rates that were measured alone in
that round (wanted: 0.9); `split` is the bytes on the second over those on the first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import click
from meters import describe_machine, keep_result, told_settings
from throttle import HeldDisk

import aio
from offload.partition.unit import Role
from offload.store.extents import FileLayout, UnitExtents, spread

HERE = Path(__file__).resolve().parent
MB = 1_000_000
UNIT_BYTES = 8 << 20
UNITS_IN_FLIGHT = 4  # about what two budgets let an engine fetch ahead
WANTED = 0.9
OPERATIONS = ("read", "write", "mixed")


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: str
    rates: tuple[int, ...]  # MB/s
    rounds: int
    num_units: int
    save: bool
    inside: bool
    theme: str


@dataclass
class Target:
    """The units on some of the drives, read from one side and written to the other."""

    layouts: list[FileLayout]
    files: dict[tuple[str, int], aio.File]
    num_drives: int

    @classmethod
    def make(cls, folders: Sequence[Path], rates: Sequence[int], num_units: int) -> Target:
        units = [UnitExtents(f"unit{i}", {Role.PARAM: UNIT_BYTES}) for i in range(num_units)]
        free = [os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize for folder in folders]
        layouts = spread(units, free, 2, [float(rate) for rate in rates])
        files = {
            (layout.unit, side): aio.File(
                folders[layout.path] / layout.names[side], "x+", size=UNIT_BYTES, drive=layout.path
            )
            for layout in layouts
            for side in (0, 1)
        }
        return cls(layouts, files, len(folders))

    def drive_bytes(self) -> list[int]:
        return [
            sum(UNIT_BYTES for layout in self.layouts if layout.path == drive)
            for drive in range(self.num_drives)
        ]

    def requests(self, operation: str, buffer: aio.Buffer) -> Iterator[aio.Request]:
        places = cycle(range(2 * UNITS_IN_FLIGHT))
        sides = ((0, "write"), (1, "write")) if operation == "fill" else ((0, "read"), (1, "write"))
        for order, layout in enumerate(self.layouts):
            for side, each in sides:
                if operation in (each, "mixed", "fill"):
                    memory = buffer.view[next(places) * UNIT_BYTES :][:UNIT_BYTES]
                    file = self.files[layout.unit, side]
                    yield aio.Request(each, file, memory, 0, order)  # type: ignore[arg-type]

    def run(self, operation: str, buffer: aio.Buffer) -> float:
        """Bytes a second."""
        ahead = UNITS_IN_FLIGHT * (2 if operation == "mixed" else 1)
        num_bytes = 0
        with aio.Queue(num_drives=self.num_drives) as queue:
            queue.register(buffer)
            waiting: list[aio.Ticket] = []
            start = time.perf_counter()
            for request in self.requests(operation, buffer):
                if len(waiting) == ahead:
                    waiting.pop(0).wait()
                waiting += queue.submit([request])
                num_bytes += UNIT_BYTES
            for ticket in waiting:
                ticket.wait()
            return num_bytes / (time.perf_counter() - start)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
            Path(file.path).unlink()


@contextmanager
def loop_drive(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A mounted ext4 on a loop device of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        image, mount = Path(scratch) / "image", Path(scratch) / "mount"
        with aio.File(image, "x+", size=num_bytes):
            pass
        device = output("losetup", "--direct-io=on", "--find", "--show", str(image))
        try:
            output("mkfs.ext4", "-q", device)
            mount.mkdir()
            output("mount", device, str(mount))
            try:
                yield mount
            finally:
                output("umount", str(mount))
        finally:
            output("losetup", "--detach", device)


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def one_round(drives: Sequence[Path], settings: Settings, buffer: aio.Buffer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases = [([drive], [rate]) for drive, rate in zip(drives, settings.rates, strict=True)]
    for folders, rates in [*cases, (list(drives), list(settings.rates))]:
        target = Target.make(folders, rates, settings.num_units)
        who = "both" if len(folders) > 1 else f"{rates[0]}"
        target.run("fill", buffer)  # what is only reserved costs no read, and a first write more
        for operation in OPERATIONS:
            found[f"{operation}: {who}"] = target.run(operation, buffer)
        found["split"] = target.drive_bytes()
        target.close()
    return found


def measure(settings: Settings) -> dict[str, Any]:
    """In a process whose drives are held already."""
    drives = [Path(drive) for drive in settings.folder.split(os.pathsep)]
    with aio.Buffer(2 * UNITS_IN_FLIGHT * UNIT_BYTES) as buffer:
        rounds = [one_round(drives, settings, buffer) for _ in range(settings.rounds)]
    rows = []
    for operation in OPERATIONS:
        alone = [[each[f"{operation}: {rate}"] for each in rounds] for rate in settings.rates]
        both = [each[f"{operation}: both"] for each in rounds]
        shares = [rate / sum(parts) for rate, *parts in zip(both, *alone, strict=True)]
        row = {
            "operation": operation, "alone": [median(rates) for rates in alone],
            "both": median(both), "of_sum": median(shares),
        }  # fmt: skip
        rows.append(row)
        click.echo(
            f"{'ok  ' if row['of_sum'] >= WANTED else 'MISS'} {operation:<6} alone"
            f" {', '.join(f'{rate / MB:.0f}' for rate in row['alone'])} MB/s, both"
            f" {row['both'] / MB:.0f} MB/s: {row['of_sum']:.3f} of the sum, wanted {WANTED}"
        )
    split = rounds[0]["split"]
    click.echo(f"     split: {split[1] / split[0]:.3f}, rates {settings.rates}")
    return {
        "machine": describe_machine(), "settings": told_settings(settings), "rows": rows,
        "split_bytes": split,
    }  # fmt: skip


def hold_and_run(settings: Settings) -> None:
    """The measurement in a child, on two new drives."""
    room = 2 * settings.num_units * UNIT_BYTES + (128 << 20)
    with ExitStack() as stack:
        drives = [
            stack.enter_context(loop_drive(Path(settings.folder), room)) for _ in settings.rates
        ]
        held = stack.enter_context(HeldDisk(drives[0], settings.rates[0] * MB))
        for drive, rate in zip(drives[1:], settings.rates[1:], strict=True):
            held.hold(drive, rate * MB)
        arguments = [
            "--folder", os.pathsep.join(map(str, drives)), "--inside",
            "--rates", ",".join(map(str, settings.rates)), "--rounds", str(settings.rounds),
            "--num-units", str(settings.num_units), *(["--save"] if settings.save else []),
        ]  # fmt: skip
        child = subprocess.Popen([sys.executable, __file__, *arguments])
        held.add(child.pid)
        status = child.wait()
    if status:
        raise click.ClickException(f"the run on the held drives ended with status {status}")


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", default=".", help="Where the images of the drives are made.")
@click.option("--rates", default="100,200", help="MB/s of each drive, a direction.")
@click.option("--rounds", default=5)
@click.option("--num-units", default=24, help="Of 8 MiB, two sides each.")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
@click.option("--inside", is_flag=True, hidden=True)
@click.option("--theme", default="drives", help="First word of the result file.")
def main(rates: str, **options: Any) -> None:
    settings = Settings(rates=tuple(int(rate) for rate in rates.split(",")), **options)
    if not settings.inside:
        hold_and_run(settings)
        return
    result = measure(settings)
    if settings.save:
        click.echo(f"\nwritten: {keep_result(settings.theme, result)}")


if __name__ == "__main__":
    main()
