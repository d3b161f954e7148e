"""How much of the memory's rate does the fused update reach?

    python benchmarks/bench_update.py [--peer-python PEER/bin/python] [--save]

Every round runs, on the same memory: the same traffic without arithmetic (the limit), our kernels,
torch's fused AdamW and DeepSpeed's CPU Adam, in fp32 and in the mixed-precision job that training
needs (bf16 gradient in, bf16 weight out; their casts included). Ratios are medians over rounds of
ratios within a round; `limit cpu` compares CPU seconds, which a busy machine disturbs less.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from meters import describe_machine, keep_result, num_cpus, told_settings
from update_streams import Streams, Timing, torch_jobs

from offload import kernels
from offload.cli.update_sweep import (
    Rounds,
    limit_jobs,
    limit_library,
    of_limit,
    our_jobs,
    ratio,
    row_of,
    timed,
)

HERE = Path(__file__).resolve().parent
VECTORS = [name for name in kernels.supported() if name != "portable"] or ["portable"]


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
        jobs = limit_jobs(library, at, pool) | our_jobs(at, threads, VECTORS) | torch_jobs(at)
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
    for dtype in ("bf16", "int8"):  # the more elements a second, the better: fewer bytes move
        for name in kernels.supported():
            reduced, plain = f"offload {name}, mixed, {dtype} state", f"offload {name}, mixed"
            if reduced in found:
                yield f"{reduced}: times {plain}", 1.0, ratio(found, plain, reduced)
    for peer, kind, wanted in (
        ("torch fused", "mixed", 1.7), ("torch fused", "fp32", 1.0),
        ("deepspeed", "mixed", 1.8), ("deepspeed", "fp32", 1.1),
    ):  # fmt: skip
        name = f"{peer}, {kind}"
        if name in found:
            yield f"{best[kind]}: times {name}", wanted, ratio(found, name, best[kind])


def report(rows: list[dict[str, Any]]) -> str:
    head = f"{'job':<36} {'Melem/s':>8} {'slowest':>8} {'fastest':>8} {'GB/s':>6} "
    lines = [head + f"{'of limit':>9} {'limit cpu':>9}"]
    for row in rows:
        rates = [
            row[k] / 1e6 for k in ("elems_per_s", "slowest_elems_per_s", "fastest_elems_per_s")
        ]
        lines.append(
            f"{row['job']:<36} {rates[0]:8.0f} {rates[1]:8.0f} {rates[2]:8.0f} "
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
    }
    facts["load_before_and_after"] = [load, os.getloadavg()]
    return {**facts, "settings": told_settings(settings), "tables": tables}


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
        click.echo(f"\nwritten: {keep_result(settings.theme, result)}")


if __name__ == "__main__":
    main()
