"""How much of the disk's rate does the I/O queue reach, at what CPU cost?

    python benchmarks/bench_aio.py [--peer-python PEER/bin/python] [--held 200] [--save]

Every round goes once through the same file, already written, with fio at several settings (buffers
on huge pages, as much memory in flight), with our queue, and with DeepSpeed's aio. `of limit` is
the median over rounds of the rate over fio's best in that round. `--held R` (root) holds the disk
at R + R MB/s instead and compares with that. The last lines tell the queue's own ceiling,
a second of CPU time long: on a drive that does nothing, and on a file in memory (tmpfs).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from aio_fio import FioSetting, Timing, huge_pages, run_fio
from meters import describe_machine, keep_result, told_settings
from throttle import HeldDisk

import aio
from aio.faults import Faults

HERE = Path(__file__).resolve().parent
OPERATIONS = ("read", "write", "mixed")
MIB = 1 << 20
SHM = Path("/dev/shm")
TRANSFER_BYTES = 4 * MIB  # the queue cuts them into blocks
MOST_IN_FLIGHT = 32 * MIB
FIO = [
    FioSetting("io_uring", MIB, 8),
    FioSetting("io_uring", MIB, 32),
    FioSetting("io_uring", MIB, 32, fixed=True),
    FioSetting("libaio", MIB, 32),
    FioSetting("io_uring", 8 * MIB, 4, fixed=True),
]
Rounds = dict[str, list[Timing]]  # by "operation: who"


@dataclass(frozen=True)
class OurSetting:
    backend: str
    block_bytes: int
    depth: int  # a direction

    @property
    def name(self) -> str:
        return f"offload {self.backend} {self.block_bytes >> 20}M x {self.depth}"

    @property
    def in_flight_bytes(self) -> int:
        return self.block_bytes * self.depth


OURS = [
    OurSetting("uring", MIB, 8),
    OurSetting("uring", MIB, 32),
    OurSetting("uring", 8 * MIB, 4),
    OurSetting("libaio", MIB, 8),
    OurSetting("threads", MIB, 8),
]


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: str
    rounds: int
    size: int  # MiB
    peer_python: str
    held: int
    child_of_held: int
    save: bool
    theme: str

    @property
    def num_bytes(self) -> int:
        return self.size * MIB // (2 * MOST_IN_FLIGHT) * 2 * MOST_IN_FLIGHT


class Disk:
    """The file that everybody goes through, written once, and our buffer."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.path = folder / f".bench-aio-{os.getpid()}"
        self.buffer = aio.Buffer(2 * MOST_IN_FLIGHT)
        words = np.frombuffer(self.buffer.view, np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 2**63, len(words), np.uint64)
        self.file = aio.File(self.path, "x+", size=num_bytes)
        self.run("write", OURS[0])

    def close(self) -> None:
        self.file.close()
        self.path.unlink()

    def transfers(self, operation: str, setting: OurSetting) -> Iterator[aio.Request]:
        """The whole file, through as much memory as fio has: blocks times depth."""
        size = max(setting.block_bytes, min(TRANSFER_BYTES, setting.in_flight_bytes))
        count = setting.in_flight_bytes // size
        half = self.num_bytes // 2

        def one(side: Any, index: int, start: int) -> aio.Request:
            place = MOST_IN_FLIGHT * (side == "write") + index % count * size
            memory = self.buffer.view[place : place + size]
            return aio.Request(side, self.file, memory, start + index * size)

        if operation != "mixed":
            yield from (one(operation, i, 0) for i in range(self.num_bytes // size))
            return
        for i in range(half // size):
            yield one("read", i, 0)
            yield one("write", i, half)

    def run(self, operation: str, setting: OurSetting) -> Timing:
        """Go once through the file, with one call."""
        with aio.Queue(
            setting.backend,
            block_bytes=setting.block_bytes,
            read_depth=setting.depth,
            write_depth=setting.depth,
        ) as queue:
            queue.register(self.buffer)
            requests = list(self.transfers(operation, setting))
            start, cpu = time.perf_counter(), time.process_time()
            tickets = queue.submit(requests)
            for ticket in reversed(tickets):  # one wake-up: the last one is the last to end
                ticket.wait()
            end, cpu_end = time.perf_counter(), time.process_time()
        return Timing(self.num_bytes, end - start, cpu_end - cpu)


class Peer:
    """The child with DeepSpeed; its jobs run when called."""

    def __init__(self, python: str, disk: Disk) -> None:
        self._child = subprocess.Popen(
            [python, str(HERE / "aio_peer.py"), str(disk.path), str(disk.num_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        hello = self._answer()
        self.jobs: list[str] = hello["jobs"]
        self.version: str = hello["version"]

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise click.ClickException(f"the peer died: exit status {self._child.wait()}")
        return json.loads(line)

    def time(self, name: str) -> Timing:
        assert self._child.stdin is not None
        self._child.stdin.write(name + "\n")
        self._child.stdin.flush()
        return Timing(*self._answer())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def one_round(disk: Disk, peer: Peer | None, *, fio: bool, huge: bool) -> dict[str, Timing]:
    found = {}
    for operation in OPERATIONS:
        for setting in FIO if fio else ():
            found[f"{operation}: {setting.name}"] = run_fio(
                disk.path, operation, setting, num_bytes=disk.num_bytes, huge=huge
            )
        for ours in OURS:
            found[f"{operation}: {ours.name}"] = disk.run(operation, ours)
        for name in peer.jobs if peer else ():
            if name.startswith(operation):
                found[name] = peer.time(name)
    return found


def best_of(found: Rounds, operation: str, who: str) -> list[float]:
    """The best rate of a round, of everyone whose name begins with `who`."""
    names = [name for name in found if name.startswith(f"{operation}: {who}")]
    return [max(found[name][i].bytes_per_s for name in names) for i in range(num_rounds(found))]


def ratio(found: Rounds, operation: str, ours: str, other: str) -> float:
    """How many times the best rate of `other` in the round: the median over rounds."""
    pairs = zip(found[f"{operation}: {ours}"], best_of(found, operation, other), strict=True)
    return median(timing.bytes_per_s / most for timing, most in pairs)


def num_rounds(found: Rounds) -> int:
    return len(next(iter(found.values())))


def row_of(found: Rounds, name: str, limits: dict[str, list[float]]) -> dict[str, Any]:
    rates = [timing.bytes_per_s for timing in found[name]]
    limit = limits[name.split(":")[0]]
    return {
        "job": name,
        "bytes_per_s": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "of_limit": median(rate / most for rate, most in zip(rates, limit, strict=True)),
        "cpu_s_per_gib": median(timing.cpu_s_per_gib for timing in found[name]),
    }


def targets(found: Rounds, rows: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """What is promised (at least): sentence, wanted, measured.  CPU costs as their inverse."""
    ours = OURS[0].name
    wanted = {"read": 0.95, "write": 0.93, "mixed": 0.95}
    for operation in OPERATIONS:
        if any("fio" in name for name in found):
            name = f"{operation}: {ours}"
            yield f"{name}, share of fio's best", wanted[operation], rows[name]["of_limit"]
            same = ratio(found, operation, ours, FIO[0].name)
            yield f"{name}, times fio at the same block and depth", wanted[operation], same
    for operation, times in (("read", 1.1), ("write", 1.2)):
        if any("deepspeed" in name for name in found):
            got = ratio(found, operation, ours, "deepspeed")
            yield f"{operation}: {ours}, times deepspeed's best", times, got
    for setting, most in ((OURS[0], 0.03), (OURS[2], 0.02)):
        for operation in ("read", "write"):
            cost = rows[f"{operation}: {setting.name}"]["cpu_s_per_gib"]
            what = f"{operation}: {setting.name}, {most} s/GiB of CPU over the measured"
            yield what, 1.0, most / max(cost, 1e-6)


def held_targets(rows: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    for operation, wanted in (("read", 0.99), ("write", 0.99), ("mixed", 1.95)):
        name = f"{operation}: {OURS[0].name}"
        yield f"{name}, times the one-way limit", wanted, rows[name]["of_limit"]


@dataclass(frozen=True)
class Ceiling:
    """What one second of CPU time, of all threads, is enough for."""

    what: str
    requests_per_cpu_s: float
    bytes_per_cpu_s: float


def ceiling() -> Iterator[Ceiling]:
    """What the queue itself costs, on a drive that does nothing and on a file in memory."""
    anywhere = 1 << 30
    with aio.Queue("faults") as queue, aio.File(os.devnull, direct=False) as null:
        Faults(queue).skip_io()
        for what, count, size in (
            ("nothing: 1 MiB blocks of large transfers", 1, 64 << 30),
            ("nothing: transfers of one block, 1000 a call", 1000, MIB),
            ("nothing: transfers of one block, one by one", 1, MIB),
        ):
            request = aio.Request("read", null, (anywhere, size), 0)
            yield spent(what, queue, [request] * count, size // MIB)
    if not SHM.is_dir():
        return
    with (
        tempfile.TemporaryDirectory(dir=SHM) as folder,
        aio.Buffer(MOST_IN_FLIGHT) as buffer,
        aio.Queue() as queue,
        aio.File(Path(folder) / "file", "x+") as file,
    ):
        queue.write(file, buffer, 0).wait()
        request = aio.Request("read", file, buffer, 0)
        yield spent("tmpfs: 1 MiB blocks, copied", queue, [request], len(buffer) // MIB)


def spent(what: str, queue: aio.Queue, requests: list[aio.Request], blocks: int) -> Ceiling:
    """Repeat for a second; `blocks`: of 1 MiB, a request."""
    start, cpu, calls = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() < start + 1:
        for ticket in queue.submit(requests):
            ticket.wait()
        calls += 1
    per_s = calls * len(requests) * blocks / (time.process_time() - cpu)
    return Ceiling(what, per_s, per_s * MIB)


def report(rows: list[dict[str, Any]], limit: str) -> str:
    head = f"{'job':<38} {'MB/s':>7} {'slowest':>8} {'fastest':>8}"
    lines = [f"{head} {limit:>8} {'CPU s/GiB':>10}"]
    for row in rows:
        rates = [row[key] / 1e6 for key in ("bytes_per_s", "slowest", "fastest")]
        lines.append(
            f"{row['job']:<38} {rates[0]:7.0f} {rates[1]:8.0f} {rates[2]:8.0f} "
            f"{row['of_limit']:8.3f} {row['cpu_s_per_gib']:10.4f}"
        )
    return "\n".join(lines)


def measure(settings: Settings, stack: ExitStack) -> tuple[Rounds, dict[str, str | bool]]:
    fio = shutil.which("fio") is not None and not settings.child_of_held
    huge = stack.enter_context(huge_pages()) if fio else False
    disk = Disk(Path(settings.folder), settings.num_bytes)
    stack.callback(disk.close)
    peer = Peer(settings.peer_python, disk) if settings.peer_python else None
    found: Rounds = {}
    for index in range(settings.rounds + 1):  # the first one warms up
        timings = one_round(disk, peer, fio=fio, huge=huge)
        if index:
            for name, timing in timings.items():
                found.setdefault(name, []).append(timing)
    if peer:
        peer.close()
    version = (
        subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout if fio else ""
    )
    facts = {
        "fio": version.strip() or "not measured",
        "fio_on_huge_pages": huge,
        "our_pages": disk.buffer.huge,
        "peer": peer.version if peer else "deepspeed not measured",
    }
    return found, facts


def run(settings: Settings) -> dict[str, Any]:
    with ExitStack() as stack:
        found, facts = measure(settings, stack)
    if settings.child_of_held:
        limits = {op: [settings.child_of_held * 1e6] * num_rounds(found) for op in OPERATIONS}
    else:
        who = "fio" if any("fio" in name for name in found) else "offload"
        limits = {operation: best_of(found, operation, who) for operation in OPERATIONS}
    rows = {name: row_of(found, name, limits) for name in found}
    click.echo(f"{facts}\n{report(list(rows.values()), 'of limit')}")
    promised = held_targets(rows) if settings.child_of_held else targets(found, rows)
    met = [{"what": what, "wanted": wanted, "measured": got} for what, wanted, got in promised]
    for each in met:
        sign = "ok  " if each["measured"] >= each["wanted"] else "MISS"
        click.echo(f"{sign} {each['what']}: {each['measured']:.3f}, wanted {each['wanted']}")
    ceilings = list(ceiling())
    for each in ceilings:
        click.echo(
            f"     {each.what}: {each.requests_per_cpu_s:,.0f} blocks and"
            f" {each.bytes_per_cpu_s / 1e9:,.1f} GB a second of CPU"
        )
    return {
        "machine": describe_machine(), **facts, "settings": told_settings(settings),
        "rows": list(rows.values()), "targets": met, "ceiling": [asdict(each) for each in ceilings],
    }  # fmt: skip


def run_held(settings: Settings) -> None:
    """The same again in a child that shares a held disk."""
    arguments = [
        "--folder", settings.folder, "--rounds", str(settings.rounds), "--size", str(settings.size),
        "--child-of-held", str(settings.held), "--theme", f"{settings.theme}-held",
        *(["--save"] if settings.save else []),
    ]  # fmt: skip
    with HeldDisk(Path(settings.folder), settings.held * 1_000_000) as disk:
        child = subprocess.Popen([sys.executable, __file__, *arguments])
        disk.add(child.pid)
        status = child.wait()
    if status:
        raise click.ClickException(f"the run on the held disk ended with status {status}")


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", default=".", help="On the disk under test.")
@click.option("--rounds", default=11, help="Rounds after the warm-up.")
@click.option("--size", default=1024, help="MiB of the file.")
@click.option("--peer-python", default="", help="Interpreter with DeepSpeed.")
@click.option("--held", default=0, help="Hold the disk at so many MB/s a direction (root).")
@click.option("--child-of-held", default=0, hidden=True)
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
@click.option("--theme", default="aio", help="First word of the result file.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    if settings.held:
        run_held(settings)
        return
    result = run(settings)
    if settings.save:
        click.echo(f"\nwritten: {keep_result(settings.theme, result)}")


if __name__ == "__main__":
    main()
