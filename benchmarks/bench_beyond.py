"""Does a model train whose state is several times the memory that its process may have?

    sudo python benchmarks/bench_beyond.py [--cap 4GiB] [--steps 20] [--save]

Runs examples/train_lm.py, a decoder of 1 billion parameters on real text with activation
checkpointing, through offload-train in a memory cgroup with a hard cap: one byte more and the
kernel kills it. The bound of a step is the greater of compute (its forward and backward, less what
they waited for) and the time in which the disk moves the step's bytes, at rates measured just
before and after. Needs root, and 30 GB of disk for 1 billion parameters.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import disk_rate
from memory_cap import capped_group, joining
from meters import MemorySampler, describe_machine, keep_result, told_settings

from offload.config import parse_bytes

HERE = Path(__file__).resolve().parent
WARM_UP = 3  # steps: the first ones fill space that was only reserved
WANTED_OF_BOUND = 1.3
STATE_BYTES = 16  # a parameter: 2 weight, 2 gradient, 4 master, 4 + 4 moments


@dataclass(frozen=True)
class Settings:
    """The command line; see its help."""

    folder: str
    cap: str
    host: str
    device: str
    layers: int
    width: int
    batch: int
    seq: int
    steps: int
    state_dtype: str
    clip: float
    save: bool
    theme: str


def disk_rates(folder: Path) -> dict[str, float]:
    file = folder / "probe.dat"
    disk_rate.prepare(file)
    command = [sys.executable, str(HERE / "disk_rate.py"), str(file), "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    file.unlink(missing_ok=True)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def train(settings: Settings, folder: Path, group: Path) -> dict[str, int]:
    """Run the training under the cap; the peaks of its memory."""
    command = [
        str(Path(sys.executable).parent / "offload-train"), "--nvme", str(folder / "nvme"),
        "--host-memory", settings.host, "--device-memory", settings.device, "--fresh",
        "--state-dtype", settings.state_dtype,
        str(HERE.parent / "examples" / "train_lm.py"), "--layers", str(settings.layers),
        "--width", str(settings.width), "--heads", str(settings.width // 128), "--checkpointing",
        "--batch", str(settings.batch), "--seq", str(settings.seq), "--steps",
        str(settings.steps), "--eval-every", "0", "--lr", "2e-4", "--clip", str(settings.clip),
        "--out", str(folder / "out"),
    ]  # fmt: skip
    (folder / "nvme").mkdir()

    with subprocess.Popen(command, preexec_fn=joining(group)) as child:
        sampler = MemorySampler(child.pid)
        sampler.phase = "whole run"
        status = child.wait()
        sampler.close()
    if status:
        raise click.ClickException(f"the training ended with status {status}")
    peaks = dict(sampler.peaks)
    with contextlib.suppress(OSError, ValueError):
        peaks["group, page cache included"] = int((group / "memory.max_usage_in_bytes").read_text())
    return peaks


def steps_of(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [
        json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if "seconds" in row], rows[-1]


def bound_of(step: dict[str, Any], rates: dict[str, float]) -> dict[str, float]:
    """Seconds of disk and compute, the terms of the bound."""
    read, write, phases = step["read_bytes"], step["write_bytes"], step["phases"]
    disk = max(read / rates["read"], write / rates["write"], (read + write) / rates["mixed"])
    working = phases.get("forward", 0.0) + phases.get("backward", 0.0)
    stalls = step["stalls"].items()
    waited = sum(taken for cause, taken in stalls if cause.startswith(("forward.", "backward.")))
    return {"disk": disk, "compute": working - waited}


def result_of(
    settings: Settings, folder: Path, rates: dict[str, float], peaks: dict[str, int]
) -> dict[str, Any]:
    steps, summary = steps_of(folder)
    measured = steps[WARM_UP:]
    bounds = [bound_of(step, rates) for step in measured]
    seconds = median(step["seconds"] for step in measured)
    bound = median(max(each.values()) for each in bounds)
    params = summary["parameters"]
    return {
        "machine": describe_machine(), "settings": told_settings(settings), "parameters": params,
        "state_bytes": STATE_BYTES * params, "peaks": peaks, "rates": rates,
        "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
        "validation_loss": summary["validation_loss"], "step_s": seconds,
        "disk_s": median(each["disk"] for each in bounds),
        "compute_s": median(each["compute"] for each in bounds), "of_bound": seconds / bound,
        "read_per_param": median(step["read_bytes"] for step in measured) / params,
        "write_per_param": median(step["write_bytes"] for step in measured) / params,
        "steps": steps,
    }  # fmt: skip


def tell(result: dict[str, Any]) -> None:
    peaks = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result["peaks"].items())
    lines = [
        f"{result['parameters'] / 1e9:.2f} G parameters, {result['state_bytes'] / 1e9:.1f} GB of"
        f" state under a cap of {result['settings']['cap']}; peaks: {peaks}",
        f"loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}, validation"
        f" {result['validation_loss']:.3f}",
        f"step {result['step_s']:.2f} s; disk {result['disk_s']:.2f} s, compute"
        f" {result['compute_s']:.2f} s; read {result['read_per_param']:.1f} and written"
        f" {result['write_per_param']:.1f} bytes a parameter",
        f"{'ok  ' if result['of_bound'] <= WANTED_OF_BOUND else 'MISS'} {result['of_bound']:.2f} x"
        f" the bound, wanted {WANTED_OF_BOUND}",
    ]
    click.echo("\n".join(lines))


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--folder", default=".", help="On the disk under test.")
@click.option("--cap", default="4GiB", help="Of the whole process.")
@click.option("--host", default="2300MiB", help="Host budget.")
@click.option("--device", default="600MiB", help="Device budget.")
@click.option("--layers", default=20)
@click.option("--width", default=2048)
@click.option("--batch", default=1)
@click.option("--seq", default=256)
@click.option("--steps", default=20)
@click.option("--state-dtype", default="fp32")
@click.option("--clip", default=1.0, help="Greatest gradient norm; 0: none.")
@click.option("--save", is_flag=True, help="Write benchmarks/results/.")
@click.option("--theme", default="beyond", help="First word of the result file.")
def main(**options: Any) -> None:
    settings = Settings(**options)
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix=".beyond-") as name:
        folder = Path(name)
        before = disk_rates(folder)
        with capped_group(parse_bytes(settings.cap, "cap")) as group:
            peaks = train(settings, folder, group)
        shutil.rmtree(folder / "nvme")
        after = disk_rates(folder)
        rates = {side: (before[side] + after[side]) / 2 for side in before}
        result = result_of(settings, folder, rates, peaks)
    tell(result)
    if settings.save:
        click.echo(f"\nwritten: {keep_result(settings.theme, result)}")


if __name__ == "__main__":
    main()
