"""What a machine with a GPU must show, in one run of less than eight minutes.

    python benchmarks/gpu_check.py --out DIR [--folder DRIVE]

    machine    versions, the device
    tests      tests/gpu: clip rates and an Inf on every placement, training equal to memory
    memory     a step in the device's memory
    streamed   weights and state in host memory, a device budget of a few units: copies beside
               compute
    disk       the same from the drive, with every step committed
    fitting    as the defaults have it

Each part is a process with a time limit, so that one that fails or hangs costs no other; after
each one DIR/result.json is written again.  DIR also gets the output of every part and the
profiler's traces (for Perfetto).  Needs torch, click, numpy, safetensors, tqdm, cffi, pytest and
the built extension; no network.  `--dry-run` goes through all of it on the processor, with a tiny
model.  Status 1: a part failed, or there is no CUDA device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMITS_S = {
    "machine": 40, "tests": 180, "memory": 50, "streamed": 90, "disk": 80, "fitting": 60
}  # fmt: skip
SMALL = {"width": 64, "depth": 2, "vocab": 64, "seq": 32, "batch": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "streamed": {
        "placement": "host", "durability": "none", "host_memory": "12GiB", "device_memory": "1GiB"
    },
    "disk": {"placement": "disk", "host_memory": "4GiB", "device_memory": "1GiB"},
    "fitting": {"host_memory": "12GiB"},
}  # fmt: skip
STEPS = {"disk": 3, "fitting": 3}  # they write every step: a drive may take seconds for one
SMALL_SETTINGS = {"host_memory": "16MiB", "device_memory": "2MiB"}


@dataclass(frozen=True)
class Check:
    """The command line; see its help."""

    out: Path
    store: Path
    shape: dict[str, int]
    steps: int
    dry: bool

    def command(self, part: str) -> list[str]:
        """What runs a part; all but the tests leave their result in a file."""
        if part == "tests":
            # The options in pyproject.toml ask for plugins that may not be there.
            options = ["-q", "-rfE", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider"]
            return [sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "gpu")]
        kind = part if part in ("machine", "memory") else "offload"
        job: dict[str, Any] = {"part": kind, "device": "cpu" if self.dry else "cuda"}
        if part != "machine":
            folder = self.store / part
            folder.mkdir()
            steps = min(self.steps, STEPS.get(part, self.steps))
            job |= {"shape": self.shape, "steps": steps, "folder": str(folder)}
            job["trace"] = str(self.out / f"{part}-trace.json")
        if kind == "offload":
            small = SMALL_SETTINGS if self.dry else {}
            timeline = {"timeline_path": str(self.out / f"{part}-timeline.json")}
            job["settings"] = SETTINGS[part] | small | timeline
        return [sys.executable, str(HERE / "gpu_step.py"), json.dumps(job), str(self.result(part))]

    def result(self, part: str) -> Path:
        return self.out / f"{part}.json"


def run_part(command: list[str], log: Path, limit_s: float) -> dict[str, Any]:
    """Run a command, at most `limit_s`, its output to `log`; never raises."""
    start = time.monotonic()
    paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    status: int | str
    with log.open("w") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    tail = log.read_text(errors="replace").splitlines()[-25:]
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "tail": tail}


def checks(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the parts show together: losses, ratios, shares of copies beside kernels."""
    found: dict[str, Any] = {}
    memory = parts.get("memory", {}).get("result")
    for part in SETTINGS:
        ours = parts.get(part, {}).get("result")
        if ours is None or "losses" not in ours:
            continue
        copies = ours.get("copies", {})
        told = {name: copies[name] for name in copies if name.endswith("_beside_kernels")}
        if memory is not None and "losses" in memory:
            pairs = zip(ours["losses"], memory["losses"], strict=False)
            told["of_memory"] = ours["step_s"] / memory["step_s"]
            told["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
        found[part] = told
    return found


def show(part: str, found: dict[str, Any]) -> None:
    """A few lines for people; the rest is in the JSON file."""
    result = found.get("result", {})
    click.echo(f"{part}: status {found['status']}, {found['seconds']} s")
    if found["status"] != 0 or part == "tests":
        click.echo("\n".join(f"    {line}" for line in found["tail"]))
    if part == "machine":
        click.echo(f"    {result}")
    if "step_s" in result:
        click.echo(f"    step {result['step_s']:.3f} s, losses {result['losses'][:3]}")
        bound = result.get("metrics", {}).get("bound", {})
        click.echo(f"    {bound.get('sentence', '')}")
        for line in result.get("copies", {}).get("picture", []):
            click.echo(f"    {line}")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu_check"))
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="On a local drive.")
@click.option("--limit", default=460.0, show_default=True, help="Seconds for all of it.")
@click.option("--part", "wanted", multiple=True, type=click.Choice(list(LIMITS_S)))
@click.option("--dry-run", is_flag=True, help="On the processor, with a tiny model.")
@click.option("--steps", type=click.IntRange(2), default=8, show_default=True)
@click.option("--width", default=2048, show_default=True)
@click.option("--depth", default=8, show_default=True)
@click.option("--vocab", default=8192, show_default=True)
@click.option("--seq", default=1024, show_default=True)
@click.option("--batch", default=16, show_default=True)
def main(
    out: Path, folder: Path | None, *, limit: float, wanted: tuple[str, ...], dry_run: bool,
    steps: int, **shape: int,
) -> None:  # fmt: skip
    """Run the parts; print what they show and write it to OUT."""
    until = time.monotonic() + limit
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as store:
        check = Check(
            out, Path(store), SMALL if dry_run else shape, 2 if dry_run else steps, dry_run
        )
        for part in [
            each for each in LIMITS_S if each == "machine" or each in (wanted or LIMITS_S)
        ]:
            left = max(until - time.monotonic(), 1.0)
            found = run_part(check.command(part), out / f"{part}.log", min(LIMITS_S[part], left))
            if check.result(part).exists():
                found["result"] = json.loads(check.result(part).read_text())
            parts[part] = found
            write(out / "result.json", parts)
            show(part, found)
            if part == "machine" and not dry_run and not found.get("result", {}).get("device"):
                raise click.ClickException("no CUDA device: nothing was checked.")
    click.echo(json.dumps({"checks": checks(parts)}, indent=1))
    sys.exit(any(found["status"] != 0 for found in parts.values()))


def write(path: Path, parts: dict[str, dict[str, Any]]) -> None:
    path.write_text(json.dumps({"parts": parts, "checks": checks(parts)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
