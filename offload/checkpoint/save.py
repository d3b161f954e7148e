"""Save a generation as a checkpoint, while training goes on.

    engine thread    reserve what follows the generation's sides; link them into .<tag>.saving, or,
                     where another file system is the target, into pins beside the store's files
    own thread       wait for the generation's commit, which comes by itself
                     copy the pinned | flush all | record, manifest, note | publish, latest, prune

The last step's writes may be under way when its files are linked; whoever begins a generation after
it writes other files (store/sharing.py), so what is saved cannot change.  Without the commit there
is no checkpoint.  `save`, `poll` and `finish` come from the engine's thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

import aio
from offload.checkpoint import folder as places
from offload.checkpoint.folder import Note
from offload.checkpoint.stream import ALONE, BEHIND_TRAINING, CopyJob, Depth, copy, data_bytes
from offload.errors import OffloadError, StoreError
from offload.store import build, checksum, durable, files, format
from offload.store.extents import HEADER_BYTES, FileLayout
from offload.store.folder import COMMIT_NAMES, MANIFEST_NAME, PIN_PREFIX
from offload.store.format import BLANK, Manifest, Record, UnitFlag
from offload.store.lock import LOCK_NAME, FolderLock
from offload.store.store import Store

_LOG = logging.getLogger(__name__)
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


class Saving:
    """The ticket of one checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Tell whether `wait` would return, or raise, at once."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Block until the checkpoint is complete and flushed; return its folder.

        Raises what went wrong (then the folder holds what it held before) and TimeoutError.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"checkpoint {self.path}: not complete after {timeout} s.")
        if self._error is not None:
            raise self._error
        return self.path

    def end(self, error: BaseException | None) -> None:
        """Internal: the saver's word."""
        self._error = error
        self._ended.set()


@dataclass(frozen=True)
class Content:
    """What is saved: a generation, which may still be on its way, and the state beside it."""

    payload: bytes = field(repr=False)
    global_step: int
    generation: int
    sides: Mapping[str, int]  # of the generation, by unit
    record: Future[Record]  # once it is committed; needs nothing from the engine's thread


@dataclass
class _Plan:
    """A checkpoint that is being written."""

    directory: Path
    note: Note
    keep: int | None
    content: Content
    manifest: Manifest  # the checkpoint's: everything in one folder
    lock: FolderLock
    linked: list[FileLayout] = field(default_factory=list)
    copied: list[CopyJob] = field(default_factory=list)
    pins: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return places.saving_folder(self.directory, self.note.tag)


class Saver:
    """Saves one checkpoint at a time."""

    def __init__(self, store: Store, *, backend: str, written: Collection[str]) -> None:
        """`written`: the units that steps write; for them something is reserved."""
        self._store = store
        self._backend = backend
        self._written = written
        self._last: Saving | None = None
        self._thread: threading.Thread | None = None

    def save(
        self, directory: Path, tag: str, content: Content, *, keep: int | None = None
    ) -> Saving:
        """Pin the generation of `content` and complete the checkpoint in the background.

        Raises StoreError, with nothing left behind, where it cannot be made.
        """
        self.finish()
        saving = Saving(directory / tag)
        with _told(f"checkpoint {tag!r} in {directory}"):
            plan = self._begin(directory, tag, content, keep)
            with _undone(plan):
                pinned = self._take(plan)
        self._last = saving
        if not pinned:
            _LOG.info("checkpoint %r: too little space to go on meanwhile, copying first.", tag)
            self._complete(plan, saving, ALONE)
            self._store.sharing.trim()
            saving.wait()
        else:
            arguments = (plan, saving, BEHIND_TRAINING)
            self._thread = threading.Thread(
                target=self._complete, args=arguments, name="checkpoint"
            )
            self._thread.start()
        return saving

    def poll(self) -> None:
        """Give back what a copy that has ended no longer needs; never waits."""
        if self._thread is not None and self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; its ticket has the error, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._store.sharing.trim()

    def _begin(self, directory: Path, tag: str, content: Content, keep: int | None) -> _Plan:
        directory.mkdir(parents=True, exist_ok=True)
        places.settle(directory)
        manifest = self._store.manifest
        together = tuple(replace(layout, path=0) for layout in manifest.files)
        note = Note(
            tag=tag,
            store_id=manifest.store_id,
            generation=content.generation,
            global_step=content.global_step,
            saved_ns=time.time_ns(),
            num_bytes=sum(layout.file_bytes for layout in together),
        )
        return _Plan(
            directory=directory,
            note=note,
            keep=keep,
            content=content,
            manifest=replace(manifest, files=together, num_paths=1),
            lock=places.make_saving_folder(directory, tag),
        )

    def _take(self, plan: _Plan) -> bool:
        """Link or pin every file; False: not pinned, training must wait for the copy."""
        store, sides = self._store, plan.content.sides
        store.sharing.trim()
        device = plan.folder.stat().st_dev
        near = [f for f in store.manifest.files if _device(store, f, sides[f.unit]) == device]
        follow = [layout for layout in near if layout.unit in self._written]
        with _space(plan, follow, "for what training writes instead of the saved files"):
            store.sharing.reserve((layout.unit, sides[layout.unit]) for layout in follow)
        for layout in store.manifest.files:
            source = store.files.path(layout.unit, sides[layout.unit])
            if layout in near and _link(source, plan.folder / source.name):
                plan.linked.append(layout)
            else:
                plan.copied.append(self._prepare_copy(plan, layout, source))
        return self._pin(plan)

    def _prepare_copy(self, plan: _Plan, layout: FileLayout, source: Path) -> CopyJob:
        side = plan.content.sides[layout.unit]
        target = plan.folder / source.name
        with _space(plan, [f for f in self._store.manifest.files if f not in plan.linked]):
            files.make_file(target, plan.manifest, layout, side)
        return CopyJob(layout, side, source, target)

    def _pin(self, plan: _Plan) -> bool:
        """Keep what is to be copied by further links; False where space or links lack."""
        written = [job for job in plan.copied if job.layout.unit in self._written]
        try:
            self._store.sharing.reserve((job.layout.unit, job.side) for job in written)
        except OSError:
            return False
        for job in plan.copied:
            pin = job.source.with_name(f"{PIN_PREFIX}{job.source.name}")
            if not _link(job.source, pin):
                return False
            plan.pins.append(pin)
            job.source = pin
        return True

    def _complete(self, plan: _Plan, saving: Saving, depth: Depth) -> None:
        error: BaseException | None = None
        try:
            with _told(f"checkpoint {plan.note.tag!r} in {plan.directory}"), _undone(plan):
                record = _await_commit(plan)
                with _bar(plan) as progress:
                    record = self._write_data(plan, record, depth, progress)
                _write_record(plan, record)
                _publish(plan)
        except BaseException as caught:
            error = caught
            _LOG.error("checkpoint %r is not saved: %s", plan.note.tag, caught)
        finally:
            for pin in plan.pins:
                pin.unlink(missing_ok=True)
            saving.end(error)

    def _write_data(
        self, plan: _Plan, record: Record, depth: Depth, progress: Callable[[int], None]
    ) -> Record:
        """Copy and flush; return the record with the checksums of what was copied."""
        flags, sums = dict(record.flags), dict(record.checksums)
        data = files.DataFiles((plan.folder,), plan.manifest, read_only=True)

        def seal(job: CopyJob) -> None:
            unit = job.layout.unit
            sums[unit] = checksum.seal(data, unit, job.side, job.sums)
            with _descriptor(job.target, os.O_RDONLY) as fd:
                durable.flush(fd)
            flags[unit] |= UnitFlag.CHECKSUMS

        if plan.copied:
            _expect(plan.copied, record)
            copy(plan.copied, backend=self._backend, depth=depth, progress=progress, finished=seal)
        for layout in plan.linked:
            name = layout.names[record.sides[layout.unit]]
            with _descriptor(plan.folder / name, os.O_RDONLY) as fd:
                durable.flush(fd)
            progress(data_bytes([layout]))
        return replace(record, flags=flags, checksums=sums)


def _await_commit(plan: _Plan) -> Record:
    """The checkpoint's record, when the generation is committed; StoreError when it is lost."""
    content = plan.content
    error = content.record.exception()
    if error is not None:
        raise StoreError(
            f"checkpoint {plan.note.tag!r} in {plan.directory}: its step is lost. {error}"
        ) from error
    record = content.record.result()
    assert (record.generation, record.sides) == (content.generation, content.sides)
    flags = {unit: flag & ~UnitFlag.SPARE_STALE for unit, flag in record.flags.items()}
    return replace(record, sequence=1, flags=flags, payload=content.payload, flushed=True)


def _expect(jobs: Collection[CopyJob], record: Record) -> None:
    """Tell what the files to be copied hold, now that it is written."""
    for job in jobs:
        unit = job.layout.unit
        job.roles = checksum.compared_roles(job.layout, record.flags[unit])
        if checksum.is_sealed(record, unit):
            job.expected = checksum.read_sums(job.source, job.layout, record.checksums[unit])


def _write_record(plan: _Plan, record: Record) -> None:
    header, body = format.encode_record(record, plan.manifest)
    for index, name in enumerate(COMMIT_NAMES):
        with _descriptor(plan.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            if index == record.sequence % 2:
                durable.write_at(fd, body, HEADER_BYTES)
                durable.write_at(fd, header, 0)
            else:
                durable.write_at(fd, BLANK, 0)
            durable.flush(fd)
    durable.replace(plan.folder / MANIFEST_NAME, format.encode_manifest(plan.manifest))


def _publish(plan: _Plan) -> None:
    tag = plan.note.tag
    places.write_note(plan.folder, plan.note)
    (plan.folder / LOCK_NAME).unlink()
    places.publish(plan.directory, tag)
    places.write_latest(plan.directory, tag)
    plan.lock.release()
    if plan.keep is not None:
        places.prune(plan.directory, plan.keep)


def _device(store: Store, layout: FileLayout, side: int) -> int:
    return store.files.path(layout.unit, side).stat().st_dev


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name; False where the file systems do not allow it."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


@contextlib.contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _undone(plan: _Plan) -> Iterator[None]:
    """After a failure nothing of the checkpoint is left."""
    try:
        yield
    except BaseException:
        for pin in plan.pins:
            pin.unlink(missing_ok=True)
        places.discard_saving(plan.directory, plan.note.tag)
        plan.lock.release()
        raise


@contextlib.contextmanager
def _space(
    plan: _Plan, layouts: Collection[FileLayout], purpose: str = "for its files"
) -> Iterator[None]:
    """Say what is missing when the disk is too full to reserve the files of `layouts`."""
    needed = sum(layout.file_bytes for layout in layouts)
    stat = os.statvfs(plan.folder)
    free = stat.f_bavail * stat.f_frsize
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StoreError(
            f"checkpoint {plan.note.tag!r} in {plan.directory}: expected "
            f"{build.format_bytes(needed)} free {purpose}, got {build.format_bytes(free)}. "
            "Training goes on. Free space (older checkpoints, keep=n), or save to another drive."
        ) from error


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OffloadError:
        raise
    except aio.IOFailed as error:
        raise StoreError(f"{what}: {error}") from error
    except OSError as error:
        raise StoreError(durable.explain(error, what)) from error


@contextlib.contextmanager
def _bar(plan: _Plan) -> Iterator[Callable[[int], None]]:
    """A progress bar with rate and time left, where stderr is a terminal."""
    total = data_bytes(plan.manifest.files)
    name = f"checkpoint {plan.note.tag}"
    with tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield lambda num_bytes: bar.update(num_bytes) and None
