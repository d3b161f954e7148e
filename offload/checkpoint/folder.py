"""Where checkpoints lie, and how one appears whole or not at all.

    <dir>/<tag>/             a store's files with one side of each unit (store/FORMAT.md), and
        CHECKPOINT           written last: tag, step, time
    <dir>/latest             the tag of the newest
    <dir>/.<tag>.saving/     being written; locked by its writer, a left-over when nobody holds it
    <dir>/.<tag>.old/        replaced by a new one of this tag; one of both is always there
    <dir>/.<tag>.gone/       being removed

Every function may be called on what a dead process left: `settle` finishes or undoes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from offload.errors import ConfigError, StoreError
from offload.store import durable, format
from offload.store.lock import LOCK_NAME, FolderLock, holder

_LOG = logging.getLogger(__name__)
NOTE_NAME = "CHECKPOINT"
LATEST_NAME = "latest"
_HIDDEN = re.compile(r"\.(.+)\.(saving|old|gone)")


@dataclass(frozen=True)
class Note:
    """What a checkpoint says of itself."""

    tag: str
    store_id: str
    generation: int
    global_step: int
    saved_ns: int  # since the epoch: orders the checkpoints of a directory
    num_bytes: int


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    path: Path
    note: Note


def check_tag(tag: object) -> str:
    """Return the tag as text; raises ConfigError for one that is no folder's name."""
    text = str(tag)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=,-]{0,99}", text) or text == LATEST_NAME:
        raise ConfigError(
            f"checkpoint tag: expected up to 100 letters, digits or '._+=,-', got {text!r}."
        )
    return text


def saving_folder(directory: Path, tag: str) -> Path:
    return directory / f".{tag}.saving"


def write_note(folder: Path, note: Note) -> None:
    durable.replace(folder / NOTE_NAME, format.encode_text("checkpoint", asdict(note)))


def read_note(folder: Path) -> Note | None:
    """Return the note of a checkpoint; None when `folder` is none.  Raises StoreCorrupt."""
    path = folder / NOTE_NAME
    try:
        value = format.decode_text("checkpoint", path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Note(**value)


def is_checkpoint(folder: Path) -> bool:
    return (folder / NOTE_NAME).exists()


def list_checkpoints(directory: Path) -> list[Found]:
    """Complete checkpoints of a directory, oldest first; a damaged note is logged and left out."""
    found = []
    for tag, path in _folders(directory):
        try:
            note = read_note(path)
        except StoreError as error:
            _LOG.warning("%s", error)
            continue
        if note is not None and note.tag == tag:
            found.append(Found(path, note))
    return sorted(found, key=lambda item: item.note.saved_ns)


def _folders(directory: Path) -> Iterator[tuple[str, Path]]:
    """Tags and their folders; one that was being replaced when its writer died is still there."""
    if not directory.is_dir():
        return
    names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
    for name in names:
        hidden = _HIDDEN.fullmatch(name)
        if hidden is None:
            yield name, directory / name
        elif hidden[2] == "old" and hidden[1] not in names:
            yield hidden[1], directory / name


def find(directory: Path, tag: str | None) -> Found | None:
    """Return the checkpoint `tag` (None: the latest); None when there is none at all.

    Raises StoreError for a tag that is not there, with those that are.
    """
    if tag is None and (note := read_note(directory)) is not None:
        return Found(directory, note)
    wanted = read_latest(directory) if tag is None else check_tag(tag)
    for name, path in _folders(directory):
        if name == wanted and (note := read_note(path)) is not None:
            return Found(path, note)
    checkpoints = [item.note.tag for item in list_checkpoints(directory)]
    if wanted is None and not checkpoints:
        return None
    there = ", ".join(checkpoints) or "none"
    if wanted is None:
        raise StoreError(
            f"checkpoints in {directory}: expected a file {LATEST_NAME!r}, got none. "
            f"Name one of these tags: {there}."
        )
    raise StoreError(
        f"checkpoint {wanted!r} in {directory}: expected it there, got these: {there}. "
        "Name one of them."
    )


def read_latest(directory: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (directory / LATEST_NAME).read_text().strip()
    return None


def write_latest(directory: Path, tag: str) -> None:
    durable.replace(directory / LATEST_NAME, f"{tag}\n".encode())


def publish(directory: Path, tag: str) -> Path:
    """Give a complete `.<tag>.saving` its name; one that had it is removed after that."""
    final, old = directory / tag, directory / f".{tag}.old"
    if final.exists():
        _remove_folder(old)
        os.rename(final, old)
    os.rename(saving_folder(directory, tag), final)
    durable.flush_folder(directory)
    _remove_folder(old)
    return final


def remove(directory: Path, tag: str) -> None:
    """Remove a checkpoint; a process that dies meanwhile leaves it whole or gone."""
    gone = directory / f".{tag}.gone"
    _remove_folder(gone)
    os.rename(directory / tag, gone)
    _remove_folder(gone)


def prune(directory: Path, keep: int) -> None:
    """Remove all checkpoints of this directory but the `keep` newest."""
    for item in list_checkpoints(directory)[:-keep]:
        remove(directory, item.note.tag)


def left_overs(directory: Path) -> list[tuple[Path, int]]:
    """Hidden folders that a dead process left, and the bytes that `settle` would free."""
    if not directory.is_dir():
        return []
    found = []
    for name in sorted(os.listdir(directory)):
        hidden, path = _HIDDEN.fullmatch(name), directory / name
        if hidden is None or not path.is_dir():
            continue
        restored = hidden[2] == "old" and not (directory / hidden[1]).exists()
        if not restored and not (hidden[2] == "saving" and holder(path) is not None):
            found.append((path, _own_bytes(path)))
    return found


def settle(directory: Path) -> int:
    """Finish or undo what a dead process left half done; return the bytes it freed."""
    freed = 0
    for name in sorted(os.listdir(directory)):
        hidden = _HIDDEN.fullmatch(name)
        if hidden is None or not (directory / name).is_dir():
            continue
        if hidden[2] == "old" and not (directory / hidden[1]).exists():
            os.rename(directory / name, directory / hidden[1])
        elif hidden[2] != "saving" or holder(directory / name) is None:
            freed += _remove_folder(directory / name)
    return freed


def make_saving_folder(directory: Path, tag: str) -> FolderLock:
    """Make an empty `.<tag>.saving` and hold it; raises StoreError when another process does."""
    folder = saving_folder(directory, tag)
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = FolderLock(folder)
    for name in os.listdir(folder):
        if name != LOCK_NAME:
            (folder / name).unlink()
    return lock


def discard_saving(directory: Path, tag: str) -> None:
    """Remove what was written of a checkpoint that is not to be."""
    with contextlib.suppress(OSError):
        _remove_folder(saving_folder(directory, tag))


def _remove_folder(folder: Path) -> int:
    """Remove a folder of plain files, the note first; return its bytes that nobody else holds."""
    if not folder.is_dir():
        return 0
    num_bytes = _own_bytes(folder)
    (folder / NOTE_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)
    return num_bytes


def _own_bytes(folder: Path) -> int:
    stats = [entry.stat() for entry in os.scandir(folder)]
    return sum(stat.st_blocks * 512 for stat in stats if stat.st_nlink == 1)
