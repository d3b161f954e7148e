"""What works here and why the rest does not: nothing is guessed, everything is tried."""

from __future__ import annotations

import os
import resource
import tempfile
from dataclasses import dataclass

from aio.buffer import Buffer, Pages
from aio.file import File
from aio.native import REAL_BACKENDS, lib, memory_of, open_queue, strerror

TRIED_BYTES = 2 << 20


@dataclass(frozen=True)
class Probe:
    """An answer of probe().  Errors are `ENAME: text`; None where it works."""

    backends: dict[str, str | None]  # in the order in which "auto" tries them
    path: str | None
    direct: bool | None  # O_DIRECT on `path`; None: no path given
    alignment: int | None  # bytes
    path_error: str | None  # why nothing could be tried on `path`
    memlock_bytes: int | None  # what an ordinary user may lock; None: unlimited
    registration: str | None  # why a 2 MiB buffer cannot be registered; None: it can
    file_registration: str | None  # the same for files
    huge_pages: Pages  # what a 2 MiB buffer gets

    @property
    def backend(self) -> str | None:
        """What "auto" chooses."""
        return next((name for name, error in self.backends.items() if error is None), None)


def probe(path: str | os.PathLike[str] | None = None) -> Probe:
    """Try every backend, the registration of a buffer and, on a folder or file, O_DIRECT."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    direct, alignment, path_error = (
        (None, None, None) if path is None else _try_path(os.fspath(path))
    )
    with Buffer(TRIED_BYTES) as buffer:
        pages = buffer.huge
        registration, file_registration = _try_registration(buffer)
    return Probe(
        backends={name: _try_backend(name) for name in REAL_BACKENDS},
        path=None if path is None else os.fspath(path),
        direct=direct,
        alignment=alignment,
        path_error=path_error,
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        registration=registration,
        file_registration=file_registration,
        huge_pages=pages,
    )


def _try_backend(name: str) -> str | None:
    queue, error = open_queue(name, block_bytes=4096, read_depth=1, write_depth=1)
    if error:
        return strerror(error)
    lib.aio_queue_close(queue)
    return None


def _try_registration(buffer: Buffer) -> tuple[str | None, str | None]:
    """Why neither a buffer nor files can be registered."""
    queue, error = open_queue("uring", block_bytes=4096, read_depth=1, write_depth=1)
    if error:
        why = f"needs io_uring, got {strerror(error)}"
        return why, why
    memory = memory_of(buffer.view, writable=True)
    error = -lib.aio_register(queue, memory.address, memory.num_bytes)
    files_error = -lib.aio_queue_registers_files(queue)
    lib.aio_queue_close(queue)
    return strerror(error) if error else None, strerror(files_error) if files_error else None


def _try_path(path: str) -> tuple[bool | None, int | None, str | None]:
    """(direct, alignment, error); in a folder with a file that is removed again."""
    try:
        if not os.path.isdir(path):
            with File(path) as file:
                return file.direct, file.alignment, None
        with (
            tempfile.NamedTemporaryFile(dir=path, prefix=".aio-probe-") as temporary,
            File(temporary.name) as file,
        ):
            return file.direct, file.alignment, None
    except OSError as error:
        return None, None, strerror(error.errno or 0)
