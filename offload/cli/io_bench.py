"""offload-bench io: the order of its measurements, what it says of them, the files it keeps.

    write the file -> sweep -> choose -> [write for --seconds] -> the engine's setting beside fio

What the engine gets is measured last, after whatever a long write did to the drive.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import aio
from offload import profile
from offload.cli import fio, io_plot, io_sweep
from offload.cli.io_sweep import OPERATIONS, QueueSetting, Sample
from offload.cli.machine import file_system
from offload.cli.shell import text
from offload.profile import Profile

SWEEP_S = 32.0  # most time for filling and sweeping; the rest of a minute is for the end
ENGINE_S = 1.0  # each of two samples of what the engine gets, and fio's between them


@dataclass(frozen=True)
class Rate:
    """One operation with the engine's setting, beside the best of the same minute."""

    engine: float  # bytes per second
    fio: float | None
    limit: float


@dataclass(frozen=True)
class Result:
    """Everything that was found out about a folder."""

    folder: Path
    file_system: str
    direct: bool
    samples: tuple[Sample, ...]
    num_skipped: int
    setting: QueueSetting
    rates: dict[str, Rate]  # by operation
    sustained: tuple[float, ...]  # bytes per second, in equal parts of `seconds`
    seconds: float
    fio: str  # how it was run, or why not


@dataclass(frozen=True)
class Files:
    """What was written, and what is to be said about it."""

    written: tuple[Path, ...]
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        return {"files": [str(path) for path in self.written], "notes": list(self.notes)}


def measure_all(folder: Path, target: io_sweep.Target, seconds: float | None) -> Result:
    """Measure in the order above; raises OSError."""
    backends = [name for name, problem in aio.probe(folder).backends.items() if problem is None]
    num_points = len(io_sweep.first_settings(backends)) + len(io_sweep.further_settings(""))
    until = time.perf_counter() + SWEEP_S
    with tqdm(
        total=num_points + 4, unit="setting", leave=False, desc="writing the file", disable=None
    ) as bar:  # None: not where there is no terminal
        target.fill()
        bar.update()

        def measured(point: io_sweep.Setting) -> None:
            bar.set_description(f"{point.operation}, {point.backend}")
            bar.update()

        samples, backend = io_sweep.sweep(target, backends, until=until, measured=measured)
        setting = io_sweep.choose(samples, backend)
        bar.set_description(f"writing for {seconds or 0:.0f} s")
        sustained = io_sweep.sustain(target, setting, seconds=seconds) if seconds else []
        how, runs = _fio_setting(setting, backends)
        rates = {}
        for operation in OPERATIONS:
            bar.set_description(f"{operation}, as the engine does it")
            best = fastest(of_operation(samples, operation)).setting.queue
            rates[operation] = _rate(target, operation, setting, best=best, runs=runs)
            bar.update()
    return Result(
        folder, file_system(folder), target.file.direct, tuple(samples), num_points - len(samples),
        setting, rates, tuple(sustained), seconds or 0.0, how,
    )  # fmt: skip


def _fio_setting(
    setting: QueueSetting, backends: Sequence[str]
) -> tuple[str, tuple[fio.FioSetting, bool] | None]:
    """How fio is run, and its setting; None where it is not there."""
    if not fio.installed():
        return "not compared: fio is not installed", None
    engine = "io_uring" if "uring" in backends else "libaio"
    depth = max(setting.read_depth, setting.write_depth)
    huge = fio.has_huge_pages(4 * depth * setting.block_bytes)
    found = fio.FioSetting(engine, setting.block_bytes, depth)
    pages = "huge pages" if huge else "ordinary pages, which are slower on many drives"
    return f"{found.name}, {pages}", (found, huge)


def _rate(
    target: io_sweep.Target, operation: str, setting: QueueSetting, *,
    best: QueueSetting, runs: tuple[fio.FioSetting, bool] | None,
) -> Rate:  # fmt: skip
    """The engine's setting, the best one of the sweep, fio, the engine's again: the same minute."""

    def ours(queue: QueueSetting) -> float:
        ends = io_sweep.run(target, operation, queue, seconds=ENGINE_S)
        return len(ends) * io_sweep.PIECE_BYTES / ends[-1]

    first, top = ours(setting), ours(best)
    other = None if runs is None else _fio_rate(target, operation, runs)
    mine = (first + ours(setting)) / 2
    return Rate(mine, other, max(mine, top, other or 0.0))


def _fio_rate(
    target: io_sweep.Target, operation: str, runs: tuple[fio.FioSetting, bool]
) -> float | None:
    """None where this fio cannot do it: too old, or its engine is blocked."""
    path = Path(f"/proc/{os.getpid()}/fd/{target.file.fileno()}")
    setting, huge = runs
    with contextlib.suppress(RuntimeError, ValueError, KeyError, ZeroDivisionError, OSError):
        return fio.run_fio(
            path, operation, setting, num_bytes=target.num_bytes, huge=huge, seconds=ENGINE_S
        ).bytes_per_s
    return None


def keep(folder: Path, result: Result) -> Files:
    """Write the profile and the picture to the folder; raises OSError."""
    text = profile.encode(
        Profile(
            path=str(folder.resolve()),
            date=datetime.datetime.now().isoformat(timespec="seconds"),
            backend=result.setting.backend,
            block_bytes=result.setting.block_bytes,
            read_depth=result.setting.read_depth,
            write_depth=result.setting.write_depth,
            read_bytes_per_s=round(result.rates["read"].engine),
            write_bytes_per_s=round(result.rates["write"].engine),
            mixed_bytes_per_s=round(result.rates["mixed"].engine),
        )
    )
    place = folder / profile.FILE_NAME
    part = place.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
    picture = place.with_suffix(".png")
    problem = io_plot.draw(picture, result.samples, result.setting.backend, result.sustained)
    return Files((place, picture) if problem is None else (place,), (problem,) if problem else ())


def warnings(result: Result) -> Iterator[str]:
    if not result.direct:
        yield (
            f"{result.folder}: no O_DIRECT on {result.file_system}: these are the rates of the"
            " page cache, not of a drive."
        )
    if result.num_skipped:
        yield f"the drive is slow: {result.num_skipped} settings were left out to end in time."
    fallen = io_sweep.fall(result.sustained) if result.sustained else None
    if fallen is not None:
        yield (
            f"the rate falls: {gb(fallen[0])} at first, {gb(fallen[1])} at the end of"
            f" {result.seconds:.0f} s of writing. A training run writes all the time: count on"
            " the latter."
        )
    for operation, rate in result.rates.items():
        first = of_operation(result.samples, operation)[0].bytes_per_s
        if rate.limit < io_sweep.FALLEN * first:
            yield (
                f"{operation}: {gb(first)} at first, at most {gb(rate.limit)} at the end: the drive"
                " slows down after a burst, or somebody else uses it. --seconds 60 tells."
            )


def report(result: Result) -> str:
    """Tables for people: the sweep, then the limit beside what the engine gets."""
    how = "O_DIRECT" if result.direct else "no O_DIRECT"
    lines = [f"{result.folder}: {result.file_system}, {how}; GB/s = 10^9 bytes per second"]
    for operation in OPERATIONS:
        lines.append(table(of_operation(result.samples, operation)))
    lines.append(f"\n{'':8}{'limit':>8}{'engine':>8}{'share':>8}{'fio':>8}")
    for operation, rate in result.rates.items():
        other = "-" if rate.fio is None else f"{rate.fio / 1e9:.2f}"
        lines.append(
            f"{operation:8}{rate.limit / 1e9:8.2f}{rate.engine / 1e9:8.2f}"
            f"{rate.engine / rate.limit:8.0%}{other:>8}"
        )
    chosen = result.setting
    lines.append(
        f"engine: {chosen.backend}, blocks of {text(chosen.block_bytes)},"
        f" {chosen.read_depth} reads and {chosen.write_depth} writes in flight"
    )
    lines.append(f"fio: {result.fio}")
    if not result.sustained:
        lines.append("not tried: whether writes slow down after a burst (--seconds 60)")
    return "\n".join(lines)


def table(samples: Sequence[Sample]) -> str:
    """One operation: a row for each backend and block size, a column for each depth."""
    found = {
        (s.setting.backend, s.setting.block_bytes, s.setting.depth): s.bytes_per_s for s in samples
    }
    top = fastest(samples)
    columns = sorted({key[2] for key in found})
    depths = "".join(f"{f'depth {depth}':>10}" for depth in columns)
    lines = ["", f"{top.setting.operation:8}{'block':>10}{depths}"]
    backends = list(dict.fromkeys(key[0] for key in found))
    rows = {key[:2] for key in found}
    for backend, block in sorted(rows, key=lambda row: (backends.index(row[0]), row[1])):
        rates = [found.get((backend, block, depth)) for depth in columns]
        cells = "".join(f"{'-' if rate is None else f'{rate / 1e9:.2f}':>10}" for rate in rates)
        lines.append(f"{backend:8}{text(block):>10}{cells}")
    lines.append(
        f"best: {gb(top.bytes_per_s)} with {top.setting.backend},"
        f" blocks of {text(top.setting.block_bytes)}, depth {top.setting.depth}"
    )
    return "\n".join(lines)


def of_operation(samples: Sequence[Sample], operation: str) -> list[Sample]:
    return [sample for sample in samples if sample.setting.operation == operation]


def fastest(samples: Sequence[Sample]) -> Sample:
    return max(samples, key=lambda sample: sample.bytes_per_s)


def gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def as_record(result: Result) -> dict[str, Any]:
    """The result in JSON values."""
    return {
        "folder": str(result.folder),
        "file_system": result.file_system,
        "direct": result.direct,
        "samples": [
            {**asdict(sample.setting), "bytes_per_s": round(sample.bytes_per_s)}
            for sample in result.samples
        ],
        "num_skipped": result.num_skipped,
        "engine": asdict(result.setting),
        "bytes_per_s": {
            operation: {
                "limit": round(rate.limit),
                "engine": round(rate.engine),
                "fio": None if rate.fio is None else round(rate.fio),
            }
            for operation, rate in result.rates.items()
        },
        "fio": result.fio,
        "sustained_bytes_per_s": [round(rate) for rate in result.sustained],
        "warnings": list(warnings(result)),
    }
