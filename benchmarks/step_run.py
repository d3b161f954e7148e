"""Run one engine of bench_step in a process of its own and collect what is known about it.

    disk rates -> start the child (in the held group) -> follow its lines, sample its memory -> Run

A child that fails gives a Run with `error`; the benchmark shows it and goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import disk_rate
from memory_cap import capped_group, joining
from meters import MemorySampler
from throttle import ChannelSampler, HeldDisk

HERE = Path(__file__).resolve().parent
DISK_ENGINES = ("offload", "deepspeed", "deepspeed-serial")


@dataclass
class Run:
    """Everything known of one engine in one round; events are the child's own lines.

    `probe`: what the disk gave just before. `rates`: what the floor is computed from, the probe or,
    on a held disk, the limits (a short probe gains from their burst and loses from busy CPUs).
    """

    engine: str
    round: int
    probe: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    error: str = ""


def _kill_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Launcher:
    """Where and how children run: the folder on the disk under test, the limit, the peer."""

    folder: Path
    peer_python: str
    peer_extensions: str
    held_bytes_per_s: int
    timeout_s: float
    probe_s: float = 1.0
    cap_bytes: int = 0
    script: str = "step_child.py"

    @property
    def probe_file(self) -> Path:
        return self.folder / "probe.dat"

    def run(self, job: dict[str, Any], index: int) -> Run:
        """Run one child to its end, its files removed afterwards."""
        with ExitStack() as stack:
            disk = None
            if self.held_bytes_per_s:
                disk = stack.enter_context(HeldDisk(self.folder, self.held_bytes_per_s))
            label = job.get("label", job["engine"])
            job = {key: value for key, value in job.items() if key != "label"}
            run = Run(label, index)
            if job["engine"] in DISK_ENGINES:
                run.probe = self._measure_disk(disk)
                run.rates = self._limits() if disk is not None else run.probe
            state = self.folder / "state"
            state.mkdir()
            stack.callback(shutil.rmtree, state, ignore_errors=True)
            self._follow(run, {**job, "folder": str(state)}, disk)
        return run

    def _measure_disk(self, disk: HeldDisk | None) -> dict[str, float]:
        command = [sys.executable, str(HERE / "disk_rate.py"), str(self.probe_file)]
        command += ["--seconds", str(self.probe_s)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            if disk is not None:
                disk.add(child.pid)
            output, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"disk_rate.py failed with status {child.returncode}")
        rates: dict[str, float] = json.loads(output)
        return rates

    def _limits(self) -> dict[str, float]:
        limit = float(self.held_bytes_per_s)
        return {"read": limit, "write": limit, "mixed": 2 * limit}

    def _environment(self, engine: str) -> dict[str, str]:
        """The peer's own: CPU accelerator, one rank, and its tools (ninja) on the path."""
        if not engine.startswith("deepspeed"):
            return dict(os.environ)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        tools = str(Path(self.peer_python).parent)
        extensions = {"TORCH_EXTENSIONS_DIR": self.peer_extensions} if self.peer_extensions else {}
        return {
            **os.environ,
            **extensions,
            "DS_ACCELERATOR": "cpu",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PATH": tools + os.pathsep + os.environ.get("PATH", ""),
        }

    @contextmanager
    def _child(
        self, job: dict[str, Any], log: Any, group: Path | None
    ) -> Iterator[tuple[subprocess.Popen, Any]]:
        """A started child and the pipe of its lines; killed if it is left early or hangs."""
        reader, writer = os.pipe()
        peer = job["engine"].startswith("deepspeed")
        python = self.peer_python if peer else sys.executable
        command = [python, str(HERE / self.script), json.dumps(job), str(writer)]
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=[writer],
            env=self._environment(job["engine"]),
            cwd=self.folder,
            start_new_session=True,
            preexec_fn=None if group is None else joining(group),
        )
        os.close(writer)
        watchdog = threading.Timer(self.timeout_s, _kill_group, [child])
        watchdog.daemon = True
        watchdog.start()
        try:
            with os.fdopen(reader) as lines:
                yield child, lines
            child.wait()
        finally:
            watchdog.cancel()
            _kill_group(child)  # after a normal end only what it left behind, such as compilers
            child.wait()

    def _follow(self, run: Run, job: dict[str, Any], disk: HeldDisk | None) -> None:
        log_path = self.folder / f"{run.engine}.log"
        with ExitStack() as stack:
            log = stack.enter_context(log_path.open("wb"))
            group = None
            if self.cap_bytes:
                group = stack.enter_context(capped_group(self.cap_bytes))
            child, lines = stack.enter_context(self._child(job, log, group))
            channel = None
            if disk is not None:
                disk.add(child.pid)
                channel = ChannelSampler(disk)
                stack.callback(channel.close)
            memory = MemorySampler(child.pid)
            stack.callback(memory.close)
            for line in lines:
                event = json.loads(line)
                self._note(run, event, memory)
                if channel is not None:
                    channel.active = memory.phase == "steps"
        run.peaks = memory.peaks
        run.busy = channel.shares() if channel is not None else {}
        if child.returncode or "drained" not in run.events:
            tail = log_path.read_text(errors="replace").splitlines()[-15:]
            run.error = f"status {child.returncode}; last lines:\n    " + "\n    ".join(tail)

    @staticmethod
    def _note(run: Run, event: dict[str, Any], memory: MemorySampler) -> None:
        """Keep an event; the memory peaks of what follows belong to the next phase."""
        name = event.pop("event")
        if name == "step":
            run.steps.append(event)
            return
        run.events[name] = event
        memory.phase = {"imported": "build", "built": "steps", "drained": "close"}[name]

    def prepare(self) -> None:
        """Make the folder and the file whose rates are measured; warm-up writes are not held."""
        self.folder.mkdir(parents=True, exist_ok=True)
        disk_rate.prepare(self.probe_file)
