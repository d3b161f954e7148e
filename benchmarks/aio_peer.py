"""DeepSpeed's aio handle in an environment of its own: a child of bench_aio that runs on demand.

    python aio_peer.py FILE NUM_BYTES

Writes its jobs' names and its version as one JSON line; then, for each name on standard input, runs
that job once and answers with [bytes, seconds, CPU seconds].
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

# block in MiB, depth, threads; single_submit off and overlap on, which is its best here
SETTINGS = [(1, 32, 1), (8, 16, 1), (1, 32, 2)]


def jobs_of(path: str, num_bytes: int) -> dict[str, Callable[[], object]]:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module = AsyncIOBuilder().load()
    jobs: dict[str, Callable[[], object]] = {}
    buffer = None
    for block, depth, threads in SETTINGS:
        handle = module.aio_handle(block << 20, depth, False, True, threads)
        if buffer is None:
            buffer = handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
            buffer.random_()
        name = f"deepspeed {block}M x {depth}, {threads} threads"
        for operation in ("read", "write"):
            jobs[f"{operation}: {name}"] = job(handle, buffer, path, operation)
    return jobs


def job(handle: object, buffer: object, path: str, operation: str) -> Callable[[], object]:
    move = handle.pread if operation == "read" else handle.pwrite  # type: ignore[attr-defined]

    def run() -> None:
        move(buffer, path, False, True)
        assert handle.wait() == 1  # type: ignore[attr-defined]

    return run


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever the peer prints must not disturb the answers
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    num_bytes = int(sys.argv[2])
    jobs = jobs_of(sys.argv[1], num_bytes)
    hello = {"jobs": list(jobs), "version": f"deepspeed {deepspeed.__version__}"}
    os.write(answer, json.dumps(hello).encode() + b"\n")
    for line in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        jobs[line.strip()]()
        timing = [num_bytes, time.perf_counter() - start, time.process_time() - cpu]
        os.write(answer, json.dumps(timing).encode() + b"\n")


if __name__ == "__main__":
    main()
