"""How much of the memory's rate does the fused update reach?

    python benchmarks/bench_update.py [--peer-python PEER/bin/python] [--save]

Every round runs, on the same memory: the same traffic without arithmetic (the limit), our kernels,
torch's fused AdamW and DeepSpeed's CPU Adam, in fp32 and in the mixed-precision job that training
needs (bf16 gradient in, bf16 weight out; their casts included). Ratios are medians over rounds of
ratios within a round; `limit cpu` compares CPU seconds, which a busy machine disturbs less.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from meters import describe_machine, hardware_slug, num_cpus
from update_streams import PAUSE_S, Job, Streams, Timing, torch_jobs

from offload import kernels

HERE = Path(__file__).resolve().parent
LIMIT_PIECES = 32
SPLIT_BYTES, F32_BYTES = 26, 28  # per element: read and written, by update_limit.c's account
Rounds = dict[str, list[Timing]]


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    num_elems: int
    rounds: int
    threads: tuple[int, ...]
    staggers: tuple[int, ...]
    peer_python: str
    save: bool
    theme: str


@contextmanager
def limit_library() -> Iterator[ctypes.CDLL]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limit.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        source = str(HERE / "update_limit.c")
        subprocess.run(["cc", *flags, source, "-o", str(library)], check=True)
        yield ctypes.CDLL(str(library))


def limit_job(function: Any, streams: list[torch.Tensor], pool: ThreadPoolExecutor) -> Job:
    """Call `function` on pieces of the streams, each on the thread that is free next."""
    num_elems = len(streams[0])
    share = max(num_elems // LIMIT_PIECES // 32, 1) * 32

    def piece(first: int) -> None:
        places = [ctypes.c_void_p(s.data_ptr() + first * s.element_size()) for s in streams]
        function(*places, ctypes.c_size_t(min(share, num_elems - first)))

    return lambda: list(pool.map(piece, range(0, num_elems, share)))


def limit_jobs(
    library: ctypes.CDLL, at: Streams, pool: ThreadPoolExecutor
) -> dict[str, Callable[[], object]]:
    split = [at.weight16, at.low, at.exp_avg, at.exp_avg_sq, at.grad16]
    whole = [at.weight, at.exp_avg, at.exp_avg_sq, at.grad]
    return {
        "limit, mixed": limit_job(library.limit_split, split, pool),
        "limit, mixed, ahead": limit_job(library.limit_split_ahead, split, pool),
        "limit, fp32": limit_job(library.limit_f32, whole, pool),
        "limit, fp32, ahead": limit_job(library.limit_f32_ahead, whole, pool),
    }


def our_jobs(at: Streams, threads: kernels.Threads) -> dict[str, Job]:
    row = kernels.adam_row(1e-4, (0.9, 0.999), 1e-8, 0.01, 6, decoupled=True)

    def job(name: str, mixed: bool) -> Job:
        def run() -> None:
            kernels.select(name)
            if mixed:
                kernels.adam_split(
                    at.weight16, at.low, at.exp_avg, at.exp_avg_sq, at.grad16,
                    row=row, threads=threads,
                )  # fmt: skip
            else:
                kernels.adam_whole(
                    at.weight, at.exp_avg, at.exp_avg_sq, at.grad, row=row, threads=threads
                )

        return run

    names = [name for name in kernels.supported() if name != "portable"] or ["portable"]
    mixed = {f"offload {name}, mixed": job(name, True) for name in names}
    return mixed | {f"offload {name}, fp32": job(name, False) for name in names}


class Peer:
    """The child with DeepSpeed; its jobs run when called."""

    def __init__(self, python: str, num_elems: int, stagger: int, num_threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        self._child = subprocess.Popen(
            [python, str(HERE / "update_peer.py"), str(num_elems), str(stagger)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
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


def measure(
    settings: Settings, num_threads: int, stagger: int, library: ctypes.CDLL
) -> tuple[Rounds, str]:
    """All jobs, `rounds` times after one warm-up round, interleaved."""
    torch.set_num_threads(num_threads)
    at = Streams(settings.num_elems, stagger)
    peer = (
        Peer(settings.peer_python, settings.num_elems, stagger, num_threads)
        if settings.peer_python
        else None
    )
    found: Rounds = {}
    with ThreadPoolExecutor(num_threads) as pool, kernels.Threads(num_threads) as threads:
        jobs = limit_jobs(library, at, pool) | our_jobs(at, threads) | torch_jobs(at)
        for index in range(settings.rounds + 1):
            timings = {name: timed(job, at) for name, job in jobs.items()}
            if peer is not None:
                timings |= {name: peer.time(name) for name in peer.jobs}
            for name, timing in timings.items():
                found.setdefault(name, []).extend([timing] if index else [])
    if peer is None:
        return found, "deepspeed not measured"
    peer.close()
    return found, peer.version


def timed(job: Job, at: Streams) -> Timing:
    """Another thread prepares the memory: on a busy machine whoever has just computed must wait."""
    with ThreadPoolExecutor(1) as preparing:
        preparing.submit(at.reset).result()
    time.sleep(PAUSE_S)
    return Timing.of(job)


def is_mixed(name: str) -> bool:
    return "mixed" in name


def ratio(found: Rounds, slower: str, faster: str, field: str = "seconds") -> float:
    """How many times `slower` takes what `faster` takes: the median over rounds."""
    pairs = zip(found[slower], found[faster], strict=True)
    return median(getattr(a, field) / getattr(b, field) for a, b in pairs)


def of_limit(found: Rounds, name: str, field: str) -> float:
    """The time of the faster limit over the time of `name`: the median over rounds."""
    plain = "limit, mixed" if is_mixed(name) else "limit, fp32"
    limits = zip(found[plain], found[plain + ", ahead"], strict=True)
    best = [min(getattr(a, field), getattr(b, field)) for a, b in limits]
    mine = [getattr(timing, field) for timing in found[name]]
    return median(b / m for b, m in zip(best, mine, strict=True))


def row_of(found: Rounds, name: str, num_elems: int) -> dict[str, Any]:
    seconds = sorted(timing.seconds for timing in found[name])
    num_bytes = SPLIT_BYTES if is_mixed(name) else F32_BYTES
    return {
        "job": name,
        "elems_per_s": num_elems / median(seconds),
        "fastest_elems_per_s": num_elems / seconds[0],
        "slowest_elems_per_s": num_elems / seconds[-1],
        "bytes_per_s": num_bytes * num_elems / median(seconds),
        "of_limit": of_limit(found, name, "seconds"),
        "of_limit_cpu": of_limit(found, name, "cpu_s"),
    }


def targets(found: Rounds) -> Iterator[tuple[str, float, float]]:
    """What is promised: sentence, wanted, measured."""
    best = {
        kind: min(
            (name for name in found if name.startswith("offload") and name.endswith(kind)),
            key=lambda name: median(timing.seconds for timing in found[name]),
        )
        for kind in ("mixed", "fp32")
    }
    used = f"offload {kernels.supported()[0]}, mixed"
    yield f"{used}: share of the limit", 0.92, of_limit(found, used, "seconds")
    yield f"{used}: share of the limit, CPU time", 0.92, of_limit(found, used, "cpu_s")
    for peer, kind, wanted in (
        ("torch fused", "mixed", 1.7), ("torch fused", "fp32", 1.0),
        ("deepspeed", "mixed", 1.8), ("deepspeed", "fp32", 1.1),
    ):  # fmt: skip
        name = f"{peer}, {kind}"
        if name in found:
            yield f"{best[kind]}: times {name}", wanted, ratio(found, name, best[kind])


def report(rows: list[dict[str, Any]]) -> str:
    head = f"{'job':<26} {'Melem/s':>8} {'slowest':>8} {'fastest':>8} {'GB/s':>6} "
    lines = [head + f"{'of limit':>9} {'limit cpu':>9}"]
    for row in rows:
        rates = [
            row[k] / 1e6 for k in ("elems_per_s", "slowest_elems_per_s", "fastest_elems_per_s")
        ]
        lines.append(
            f"{row['job']:<26} {rates[0]:8.0f} {rates[1]:8.0f} {rates[2]:8.0f} "
            f"{row['bytes_per_s'] / 1e9:6.1f} {row['of_limit']:9.2f} {row['of_limit_cpu']:9.2f}"
        )
    return "\n".join(lines)


def table_of(found: Rounds, settings: Settings) -> dict[str, Any]:
    return {
        "rows": [row_of(found, name, settings.num_elems) for name in found],
        "targets": [
            {"what": what, "wanted": wanted, "measured": got}
            for what, wanted, got in targets(found)
        ],
    }


def show(table: dict[str, Any]) -> None:
    click.echo(f"\n{table['threads']} threads, stagger {table['stagger']}, {table['peer']}")
    click.echo(report(table["rows"]))
    for each in table["targets"]:
        sign = "ok  " if each["measured"] >= each["wanted"] else "MISS"
        click.echo(f"{sign} {each['what']}: {each['measured']:.2f}, wanted {each['wanted']:.2f}")


def run(settings: Settings) -> dict[str, Any]:
    tables, load = [], os.getloadavg()
    with limit_library() as library:
        for num_threads, stagger in product(settings.threads, settings.staggers):
            found, peer = measure(settings, num_threads, stagger, library)
            which = {"threads": num_threads, "stagger": stagger, "peer": peer}
            tables.append(which | table_of(found, settings))
            show(tables[-1])
    facts: dict[str, Any] = {
        "machine": describe_machine(),
        "torch": torch.__version__,
        "command": sys.argv,
    }
    facts["load_before_and_after"] = [load, os.getloadavg()]
    return {**facts, "settings": asdict(settings), "tables": tables}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--num-elems", default=64 << 20, help="Elements of every stream.")
@click.option("--rounds", default=9, help="Rounds after the warm-up.")
@click.option("--threads", multiple=True, default=sorted({1, num_cpus()}), type=int)
@click.option("--stagger", "staggers", multiple=True, default=[0, 192], help="Bytes.")
@click.option("--peer-python", default="", help="Interpreter with DeepSpeed.")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
@click.option("--theme", default="update", help="First word of the result file.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    result = run(settings)
    if settings.save:
        month = datetime.date.today().strftime("%Y-%m")
        path = HERE / "results" / f"{settings.theme}-{hardware_slug()}-{month}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        click.echo(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
