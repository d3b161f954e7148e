"""`make demo`: train a model whose state is at least three times the memory that it may hold.

    this process --starts--> offload-train ... examples/train_lm.py
         '---- samples RssAnon + RssShmem of the child, so the child's own account is not trusted

Ends with a report, and with status 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STATE_BYTES_PER_PARAM = 12  # bf16 weight, low half of the master, two fp32 moments
OVERHEAD_BYTES = 200_000_000  # 150 MB of threads, queues and libraries, 50 MB of activations
SAMPLE_INTERVAL_S = 0.02
MIB = 1 << 20
PRIVATE = ("RssAnon:", "RssShmem:", "HugetlbPages:")


@dataclass(frozen=True)
class Demo:
    """Model and budgets: 99.5 million parameters in 376 MiB."""

    host_mib: int = 248
    device_mib: int = 128
    arguments: tuple[str, ...] = (
        *("--layers", "14", "--width", "768", "--heads", "12", "--checkpointing"),
        *("--batch", "4", "--seq", "64", "--steps", "80", "--lr", "6e-4", "--eval-every", "20"),
        *("--max-minutes", "5"),  # a slow or busy machine ends in time too, with fewer steps
    )

    @property
    def budget_bytes(self) -> int:
        return (self.host_mib + self.device_mib) * MIB


class PeakMemory(threading.Thread):
    """Greatest private memory of a process, sampled until `stop()`."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        try:
            self.peak_bytes = max(self.peak_bytes, private_bytes(self._status.read_text()))
        except OSError:
            pass  # it has ended

    def stop(self) -> int:
        self._ended.set()
        self.join()
        self.sample()
        return self.peak_bytes


def private_bytes(status: str) -> int:
    """Memory that no file backs, from the text of a /proc/PID/status."""
    rows = (line.split() for line in status.splitlines())
    return sum(int(row[1]) * 1024 for row in rows if row and row[0] in PRIVATE)


def peak_of(command: list[str]) -> tuple[int, int]:
    """Run `command` to its end; return its exit status and its peak of private memory."""
    with subprocess.Popen(command) as child:
        memory = PeakMemory(child.pid)
        memory.start()
        try:
            status = child.wait()
        except KeyboardInterrupt:
            status = child.wait()  # Ctrl-C reached the child too: let it leave in order
        return status, memory.stop()


def import_peak() -> int:
    """Private memory of a process that has imported everything and done nothing."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import train_lm, offload, matplotlib"
    code += "; import time; time.sleep(0.2)"  # a few samples
    status, peak = peak_of([sys.executable, "-c", code])
    if status:
        sys.exit("demo: the packages cannot be imported; run `make clean` and `make demo` again.")
    return peak


@dataclass(frozen=True)
class Outcome:
    """What a run reached, from its own record and from the measurement outside."""

    demo: Demo
    final: dict[str, Any]
    steps: list[dict[str, Any]]
    peak: int
    baseline: int  # of the imports

    @property
    def state_bytes(self) -> int:
        return int(self.final["parameters"]) * STATE_BYTES_PER_PARAM

    @property
    def ratio(self) -> float:
        return self.state_bytes / self.demo.budget_bytes

    @property
    def above(self) -> int:
        return self.peak - self.baseline

    def lines(self) -> Iterator[tuple[str, str]]:
        final, num_steps = self.final, len(self.steps)
        moved = [
            sum(row[k] for row in self.steps) // num_steps for k in ("read_bytes", "write_bytes")
        ]
        per_param = [num_bytes / final["parameters"] for num_bytes in moved]
        yield "parameters", f"{final['parameters'] / 1e6:.1f} million"
        yield "model state", f"{mb(self.state_bytes)}, {STATE_BYTES_PER_PARAM} bytes a parameter"
        budgets = f"host {self.demo.host_mib} MiB, device {self.demo.device_mib} MiB"
        yield "both budgets", f"{mb(self.demo.budget_bytes)}: {budgets}"
        yield "state / budgets", f"{self.ratio:.2f}"
        yield "peak memory", f"{mb(self.peak)}, measured from outside from start to end"
        yield "  above imports", f"{mb(self.above)}: budgets, activations, torch's working memory"
        yield "disk, mean step", f"read {mb(moved[0])}, written {mb(moved[1])}"
        yield "  per parameter", f"{per_param[0]:.1f} + {per_param[1]:.1f} bytes"
        seconds = statistics.median(row["seconds"] for row in self.steps)
        yield "steps", f"{num_steps} of {seconds:.2f} s (median)"
        yield "validation loss", f"{final['validation_loss']:.3f} nats a byte"
        yield "unigram entropy", f"{final['unigram_entropy']:.3f} nats a byte"

    def broken_promises(self) -> Iterator[str]:
        if self.ratio < 3:
            yield f"state / budgets: expected at least 3, got {self.ratio:.2f}"
        most = self.demo.budget_bytes + OVERHEAD_BYTES
        if self.above > most:
            yield f"peak memory above imports: expected at most {mb(most)}, got {mb(self.above)}"
        if self.final["validation_loss"] >= self.final["unigram_entropy"]:
            yield "validation loss: expected less than the unigram entropy"


def mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def read_outcome(demo: Demo, numbers: Path, *, peak: int, baseline: int) -> Outcome:
    rows = [json.loads(line) for line in numbers.read_text().splitlines()]
    steps = [row for row in rows if "read_bytes" in row]
    return Outcome(demo, rows[-1], steps, peak, baseline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="state and results")
    folder = parser.parse_args().dir
    demo = Demo()
    nvme = folder / "nvme"
    nvme.mkdir(parents=True, exist_ok=True)
    baseline = import_peak()
    status, peak = peak_of(
        [
            *(sys.executable, "-m", "offload.cli.train", "--nvme", str(nvme), "--fresh"),
            *("--host-memory", f"{demo.host_mib}MiB", "--device-memory", f"{demo.device_mib}MiB"),
            *(str(HERE / "train_lm.py"), "--out", str(folder), *demo.arguments),
        ]
    )
    if status:
        sys.exit(status)
    shutil.rmtree(nvme)  # 2.4 GB that nobody needs any more
    outcome = read_outcome(demo, folder / "metrics.jsonl", peak=peak, baseline=baseline)
    for name, value in outcome.lines():
        print(f"{name:<16} {value}")
    broken = list(outcome.broken_promises())
    for promise in broken:
        print(f"demo: not kept: {promise}", file=sys.stderr)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
