"""A process that trains in lives: `python lives.py`, one JSON request a line on stdin.

Each request forks a child that trains through `offload-train` (so torch is imported once) and dies
at the n-th Python call of its script, by SIGKILL or SIGTERM, or lives to the end.
The answer is a JSON line: exit status, what the child noted before it died, what it reported.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from checkpoint_run import Run, state_of

from offload.cli import train

# The first frame that matches, from the inside out, says what the process was doing.
PHASES = (
    ("_write_data", "checkpoint"),
    ("save_checkpoint", "checkpoint"),
    ("export", "export"),
    ("_begin_commit", "commit"),
    ("commit", "commit"),
    ("step", "update"),
    ("backward", "backward"),
    ("_accumulated", "backward"),
    ("__call__", "forward"),
    ("__init__", "start"),
)


class Tripwire:
    """Counts the calls of the main thread and dies at number `at`."""

    def __init__(self, at: int | None, number: int, notes: Path) -> None:
        self.at = at
        self.number = number
        self.notes = notes
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        self.count += 1
        if self.count == self.at:
            self.notes.write_text(phase_of(frame))
            os.kill(os.getpid(), self.number)


def phase_of(frame: FrameType | None) -> str:
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return next((phase for name, phase in PHASES if name in names), "between")


def live(request: dict[str, Any]) -> None:
    """Train under offload-train; report to `report`."""
    torch.set_num_threads(1)
    script = Path(request["report"]).with_suffix(".py")
    script.write_text("import lives\nlives.script()\n")
    start = ["--resume"] if request["resume"] else ["--fresh"]
    durability = ["--durability", request["durability"]]
    sys.argv = ["offload-train", "--nvme", request["store"], *start, *durability, str(script)]
    sys.modules["lives"] = sys.modules["__main__"]
    os.environ["LIVES"] = json.dumps(request)
    train.main()


def script() -> None:
    """The training script that offload-train runs."""
    request = json.loads(os.environ["LIVES"])
    root = Path(request["store"]).parent
    wire = Tripwire(request["at"], request["signal"], Path(request["notes"]))
    sys.setprofile(wire)
    run = Run(Path(request["store"]), nvme_path=None, seed=0 if not request["resume"] else 7)
    report = {"started_at": run.engine.global_step}
    put(Path(request["report"]), json.dumps(report))
    while run.engine.global_step < request["num_steps"]:
        run.steps(1)
        put(Path(request["report"]).with_suffix(".step"), str(run.engine.global_step))
        if run.engine.global_step % 3 == 0:
            run.engine.save_checkpoint(root / "checkpoints", "linked", keep=1)
        if run.engine.global_step % 4 == 0:
            run.engine.export(root / f"export-{os.getpid()}-{run.engine.global_step}")
    state = state_of(run)
    text = json.dumps({key: repr(value) for key, value in sorted(state.items())})
    report["state"] = hashlib.sha256(text.encode()).hexdigest()
    run.engine.close()
    sys.setprofile(None)
    report["calls"] = wire.count
    put(Path(request["report"]), json.dumps(report))


def put(path: Path, text: str) -> None:
    """Write a file so that a death in here leaves the old text or the new one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def warm_up() -> None:
    """Import what torch imports late, before the first fork."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=2)
    torch.save({}, io.BytesIO())


def main() -> None:
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        for key in ("notes", "report"):
            request[key] = tempfile.mkstemp(dir=request["scratch"])[1]
        pid = os.fork()
        if pid == 0:
            live(request)
            return  # through the interpreter's exit: finalizers close the engine
        _, status = os.waitpid(pid, 0)
        report = Path(request["report"])
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "phase": Path(request["notes"]).read_text(),
            "report": json.loads(report.read_text() or "{}"),
            "returned_steps": read_number(report.with_suffix(".step")),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def read_number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


if __name__ == "__main__":
    assert signal.SIGKILL == 9
    main()
