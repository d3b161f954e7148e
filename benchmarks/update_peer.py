"""DeepSpeed's CPU Adam in an environment of its own: a child of bench_update that runs on demand.

    python update_peer.py NUM_ELEMS STAGGER

Writes its jobs' names and its version as one JSON line; then, for each name on standard input, runs
that job once and answers with [seconds, CPU seconds]. OMP_NUM_THREADS says how many threads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from update_streams import PAUSE_S, Job, Streams, Timing, deepspeed_jobs


def serve(jobs: dict[str, Job], streams: Streams, answer: int) -> None:
    for line in sys.stdin:
        with ThreadPoolExecutor(1) as preparing:  # as bench_update does
            preparing.submit(streams.reset).result()
        time.sleep(PAUSE_S)
        timing = Timing.of(jobs[line.strip()])
        os.write(answer, json.dumps([timing.seconds, timing.cpu_s]).encode() + b"\n")


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever the peer prints must not disturb the answers
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    streams = Streams(int(sys.argv[1]), int(sys.argv[2]))
    jobs = deepspeed_jobs(streams)
    hello = {"jobs": list(jobs), "version": f"deepspeed {deepspeed.__version__}"}
    os.write(answer, json.dumps(hello).encode() + b"\n")
    serve(jobs, streams, answer)


if __name__ == "__main__":
    main()
