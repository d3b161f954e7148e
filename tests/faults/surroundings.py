"""Train two steps in surroundings that lack something: `python surroundings.py FOLDER`.

Each case is a child of this process, so that torch is imported once; the answer is one JSON object
with losses, what was logged, what was raised and what the report notes, by case.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import platform
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch

import aio
from offload import OffloadEngine
from offload.cli import machine

IO_URING_SETUP = 425
IO_SETUP = {"x86_64": 206, "aarch64": 0}[platform.machine()]
NOBODY = 65534
Case = Callable[[Path], str]  # prepares the process, returns the path to train on


def block_call(number: int, error: int) -> None:
    """From now on the system call `number` fails with `error` in this process (seccomp)."""
    libc = ctypes.CDLL(None, use_errno=True)
    allow, refuse = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50000 | error)
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), refuse, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = Program(len(steps), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0


def plain(folder: Path) -> str:
    return str(folder)


def no_uring(folder: Path) -> str:
    block_call(IO_URING_SETUP, errno.EPERM)
    return str(folder)


def neither_ring_nor_kernel_aio(folder: Path) -> str:
    """EAGAIN is what io_setup says when fs.aio-max-nr is exhausted."""
    block_call(IO_URING_SETUP, errno.ENOSYS)
    block_call(IO_SETUP, errno.EAGAIN)
    return str(folder)


def ordinary_user_who_may_lock_nothing(folder: Path) -> str:
    warm = folder.with_name("warm")
    warm.mkdir()
    train(str(warm))  # everything is imported while it can be read
    folder.chmod(0o777)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return str(folder)


def relative_path(folder: Path) -> str:
    os.chdir(folder.parent)
    return folder.name


def odd_name(folder: Path) -> str:
    odd = folder / "mein Ordner, größer: 名前"
    odd.mkdir()
    return str(odd)


def in_memory(folder: Path) -> str:
    return tempfile.mkdtemp(dir="/dev/shm", prefix="offload-test-")


def read_only_mount(folder: Path) -> str:
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "offload-test", str(folder)]
    subprocess.run(mount, check=True)
    return str(folder)


CASES: tuple[Case, ...] = (
    plain, no_uring, neither_ring_nor_kernel_aio, relative_path, odd_name, in_memory,
)  # fmt: skip
ROOT_CASES: tuple[Case, ...] = (ordinary_user_who_may_lock_nothing, read_only_mount)


def train(path: str) -> dict[str, Any]:
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(listener)
    answer: dict[str, Any] = {"said": said, "losses": [], "error": None, "path": path}
    try:
        for resume in (None, True):
            model = models.build(models.Decoder)
            settings = {"param_persistence_threshold": 0, "host_memory": "64MiB"}
            with OffloadEngine(model, nvme_path=path, resume=resume, **settings) as engine:
                loss = engine(*models.batch(engine.global_step))
                engine.backward(loss)
                engine.step()
                answer["losses"].append(loss.item())
        answer["notes"] = list(machine.notes(Path(path), aio.probe(path)))
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def run(case: Case, folder: Path) -> dict[str, Any]:
    """In a child, whose end undoes what the case did to it."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        with open(send, "w") as out:
            json.dump(train(case(folder)), out)
        os._exit(0)
    os.close(send)
    with open(receive) as answers:
        text = answers.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": "the child died"}


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    answers = {}
    for case in (*CASES, *(ROOT_CASES if os.geteuid() == 0 else ())):
        folder = root / case.__name__
        folder.mkdir()
        answers[case.__name__] = run(case, folder)
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
