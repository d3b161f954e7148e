"""Time the fused update beside the same traffic without arithmetic: what the memory allows.

Every round runs all jobs on the same memory. Ratios are medians over rounds of ratios within a
round; those of CPU seconds are disturbed less by a busy machine.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from offload import kernels
from offload.cli.update_memory import PAUSE_S, Job, Streams, Timing
from offload.optim.choice import choose
from offload.optim.rules import KernelRule

LIMIT_PIECES = 32
# Per element: read and written, by update_limit.c's account; of int8, 1/8 for scales.
BYTES = {"mixed": 26.0, "fp32": 28.0, "mixed, bf16 state": 18.0, "mixed, int8 state": 14.125}
OPTIMIZERS: dict[str, dict[str, Any]] = {  # beside Adam: settings by what a row is called
    "sgd": {},
    "sgd momentum": {"momentum": 0.9},
    "lion": {},
    "adagrad": {},
}
Rounds = dict[str, list[Timing]]


@contextmanager
def limit_library() -> Iterator[ctypes.CDLL]:
    """Compile the limit for this very machine; raises OSError or CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limit.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        source = str(Path(__file__).with_name("update_limit.c"))
        command = ["cc", *flags, source, "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        yield ctypes.CDLL(str(library))


def limit_job(function: Any, streams: list[torch.Tensor], pool: ThreadPoolExecutor) -> Job:
    """Call `function` on pieces of the streams, each on the thread that is free next."""
    num_elems = len(streams[0])
    share = max(num_elems // LIMIT_PIECES // 32, 1) * 32

    def piece(first: int) -> None:
        places = [ctypes.c_void_p(s.data_ptr() + first * s.element_size()) for s in streams]
        function(*places, ctypes.c_size_t(min(share, num_elems - first)))

    return lambda: list(pool.map(piece, range(0, num_elems, share)))


def limit_jobs(library: ctypes.CDLL, at: Streams, pool: ThreadPoolExecutor) -> dict[str, Job]:
    split = [at.weight16, at.low, at.exp_avg, at.exp_avg_sq, at.grad16]
    whole = [at.weight, at.exp_avg, at.exp_avg_sq, at.grad]
    reduced = {
        f"limit, mixed, {name} state{suffix}": limit_job(
            getattr(library, f"limit_{name}{symbol}"),
            [at.weight16, at.low, *at.states[name], at.grad16], pool,
        )
        for name in at.states
        for suffix, symbol in (("", ""), (", ahead", "_ahead"))
    }  # fmt: skip
    return reduced | {
        "limit, mixed": limit_job(library.limit_split, split, pool),
        "limit, mixed, ahead": limit_job(library.limit_split_ahead, split, pool),
        "limit, fp32": limit_job(library.limit_f32, whole, pool),
        "limit, fp32, ahead": limit_job(library.limit_f32_ahead, whole, pool),
    }


def our_jobs(
    at: Streams, threads: kernels.Threads, variants: Sequence[str]
) -> dict[str, Job]:  # each selects its variant
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

    def reduced(name: str, dtype: str) -> Job:
        scales = at.scales if dtype == "int8" else [None, None]
        states = [
            kernels.State(state, data, scale)
            for state, data, scale in zip(
                ("exp_avg", "exp_avg_sq"), at.states[dtype], scales, strict=True
            )
        ]

        def run() -> None:
            kernels.select(name)
            master = kernels.Split(at.weight16, at.low)
            kernels.update(master, states, at.grad16, row=row, threads=threads)

        return run

    mixed = {f"offload {name}, mixed": job(name, True) for name in variants}
    for dtype in at.states:
        mixed |= {
            f"offload {name}, mixed, {dtype} state": reduced(name, dtype) for name in variants
        }
    return mixed | {f"offload {name}, fp32": job(name, False) for name in variants}


def optimizer_jobs(at: Streams, threads: kernels.Threads, variant: str) -> dict[str, Job]:
    """The other optimizers over a split master, in `variant`."""

    def job(name: str) -> Job:
        choice = choose(name.split()[0], None, OPTIMIZERS[name])
        rule = cast(KernelRule, choice.rule)
        row = rule.row(choice.defaults, step=6, grad_scale=1.0)
        # Adam, which runs on the same memory, must find no negative square.
        data = at.exp_avg_sq if name == "adagrad" else at.exp_avg
        states = [kernels.State(state, data) for state in rule.states]

        def run() -> None:
            kernels.select(variant)
            master = kernels.Split(at.weight16, at.low)
            kernels.update(master, states, at.grad16, row=row, threads=threads)

        return run

    return {f"{name} {variant}, mixed": job(name) for name in OPTIMIZERS}


def num_bytes_of(name: str) -> float:
    """Bytes per element that a job reads and writes."""
    found = [known for known in OPTIMIZERS if name.startswith(f"{known} ")]
    if not found:
        return BYTES[kind_of(name)]
    return BYTES["mixed"] - 16 + (8 if found[-1] != "sgd" else 0)  # a state is 8 bytes


def timed(job: Job, at: Streams) -> Timing:
    """Another thread prepares the memory: on a busy machine whoever has just computed must wait."""
    with ThreadPoolExecutor(1) as preparing:
        preparing.submit(at.reset).result()
    time.sleep(PAUSE_S)
    return Timing.of(job)


def kind_of(name: str) -> str:
    """What a job moves: a key of BYTES."""
    return name.split(", ", 1)[1].removesuffix(", ahead")


def ratio(found: Rounds, slower: str, faster: str, field: str = "seconds") -> float:
    """How many times `slower` takes what `faster` takes: the median over rounds."""
    pairs = zip(found[slower], found[faster], strict=True)
    return float(median(getattr(a, field) / getattr(b, field) for a, b in pairs))


def of_limit(found: Rounds, name: str, field: str) -> float:
    """The time of the faster limit over the time of `name`: the median over rounds.

    Of a job with fewer streams than the limit: at the limit's bytes per second.
    """
    plain = f"limit, {kind_of(name)}"
    limits = zip(found[plain], found[plain + ", ahead"], strict=True)
    share = num_bytes_of(name) / BYTES[kind_of(name)]
    best = [share * min(getattr(a, field), getattr(b, field)) for a, b in limits]
    mine = [getattr(timing, field) for timing in found[name]]
    return float(median(b / m for b, m in zip(best, mine, strict=True)))


def row_of(found: Rounds, name: str, num_elems: int) -> dict[str, Any]:
    """One job's rates and shares of the limit; None where the limit was not measured."""
    seconds = sorted(timing.seconds for timing in found[name])
    num_bytes = num_bytes_of(name)
    has_limit = any(known.startswith("limit") for known in found)
    return {
        "job": name,
        "elems_per_s": num_elems / median(seconds),
        "fastest_elems_per_s": num_elems / seconds[0],
        "slowest_elems_per_s": num_elems / seconds[-1],
        "bytes_per_s": num_bytes * num_elems / median(seconds),
        "of_limit": of_limit(found, name, "seconds") if has_limit else None,
        "of_limit_cpu": of_limit(found, name, "cpu_s") if has_limit else None,
    }
