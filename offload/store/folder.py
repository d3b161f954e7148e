"""A store's folders: `<path>/offload-<name>/`, one per path, and what may lie in them.

LOCK        who owns it                          (lock.py)
PART        which store, which of its folders    written first
MANIFEST    what the store is                    written last, in folder 0: the store exists
COMMIT.0/1  the last two generations             folder 0
00007-model.layers.3.r0.A    data                one per unit, rank and side
...A.next   reserved: takes the place of a data file that a checkpoint shares
scratch-*   spilled data, meaningless after a restart
pin-*       links that keep a generation while it is copied, meaningless after a restart
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError, StoreError
from offload.store import format
from offload.store.lock import LOCK_NAME

MANIFEST_NAME = "MANIFEST"
PART_NAME = "PART"
COMMIT_NAMES = ("COMMIT.0", "COMMIT.1")
SCRATCH_PREFIX = "scratch-"
PIN_PREFIX = "pin-"
NEXT_SUFFIX = ".next"
_OURS = re.compile(
    r"LOCK|(MANIFEST|PART)(\.new)?|COMMIT\.[01]|(scratch|pin)-.+|"
    rf"{format.DATA_NAME.pattern}({re.escape(NEXT_SUFFIX)})?"
)


@dataclass(frozen=True)
class Part:
    """A folder's word about the store that it belongs to."""

    store_id: str
    index: int
    num_paths: int
    paths: tuple[str, ...] = ()  # where all folders lay when the store was made

    def place_of(self, index: int) -> str:
        """` (it was made at PATH)`, or nothing where that is not known."""
        return f" (it was made at {self.paths[index]})" if index < len(self.paths) else ""


@dataclass(frozen=True)
class Found:
    """What lies at the given paths, without any lock."""

    folders: tuple[Path, ...]  # as given
    parts: tuple[Part | None, ...]  # one per folder; None: no folder, or not yet marked
    manifest: Path | None  # the file

    @property
    def occupied(self) -> tuple[Path, ...]:
        return tuple(folder for folder in self.folders if folder.is_dir())


def folder_of(path: Path, name: str) -> Path:
    return path / f"offload-{name}"


def find(paths: Sequence[str | os.PathLike[str]], name: str) -> Found:
    """Look at every path; raise on one that is missing or is no directory."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ConfigError(
            f"store name: expected up to 100 letters, digits, '.', '_' or '-', got {name!r}."
        )
    if not paths:
        raise ConfigError("store paths: expected at least one directory, got none.")
    folders = tuple(folder_of(_checked(Path(path)), name) for path in paths)
    if len({folder.parent.resolve() for folder in folders}) < len(folders):
        raise ConfigError(f"store paths: the same directory was given twice: {_listed(paths)}.")
    parts = tuple(_read_part(folder) for folder in folders)
    found = [folder for folder in folders if (folder / MANIFEST_NAME).exists()]
    if len(found) > 1:
        raise StoreError(
            f"store {name!r}: two stores of this name lie at {found[0]} and {found[1]}. "
            "Give the paths of one of them."
        )
    return Found(folders, parts, found[0] / MANIFEST_NAME if found else None)


def _checked(path: Path) -> Path:
    if not path.exists():
        raise StoreError(
            f"store path {path}: expected a directory, got nothing there. "
            "Create it, or mount the drive."
        )
    if not path.is_dir():
        raise StoreError(f"store path {path}: expected a directory, got a file.")
    return path


def _read_part(folder: Path) -> Part | None:
    path = folder / PART_NAME
    try:
        value = format.decode_text("part", path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"store {folder}: cannot be read: {error.strerror or error}.") from error
    paths = tuple(value.get("paths", ()))
    return Part(value["store_id"], value["index"], value["num_paths"], paths)


def encode_part(part: Part) -> bytes:
    value = {"store_id": part.store_id, "index": part.index, "num_paths": part.num_paths}
    value["paths"] = list(part.paths)
    return format.encode_text("part", value)


def check_half_made(found: Found) -> None:
    """Raise unless what lies there is the start of a store that never came to exist.

    The folder that would hold the manifest must be among the given ones: else these may be the
    other drives of a living store.
    """
    ids = {part.store_id for part in found.parts if part is not None and part.index == 0}
    for folder, part in zip(found.folders, found.parts, strict=True):
        if part is not None and part.store_id not in ids:
            raise StoreError(
                f"store {folder}: is folder {part.index + 1} of {part.num_paths} of a store whose "
                f"manifest lies elsewhere{part.place_of(0)}. Give all of its paths, check that "
                "each drive is mounted, or use another name."
            )


def check_only_ours(folder: Path) -> None:
    """Raise when `folder` holds a file that no store made."""
    foreign = sorted(entry for entry in os.listdir(folder) if not _OURS.fullmatch(entry))
    if foreign:
        raise StoreError(
            f"store {folder}: expected files of a store only, got {_listed(foreign[:3])}. "
            "Move them away, or use another name."
        )


def clear(folders: Sequence[Path]) -> None:
    """Remove all files of a store but the locks, which the caller holds.

    The manifest goes first: whatever survives a crash in between is then no store.  The mark of
    folder 0 goes last: as long as it is there, the other folders are known to be left-overs.
    """
    for folder in folders:
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
    for folder in sorted(folders, key=_is_first):
        names = [name for name in os.listdir(folder) if _OURS.fullmatch(name) and name != LOCK_NAME]
        for name in sorted(names, key=lambda name: name == PART_NAME):
            (folder / name).unlink()


def _is_first(folder: Path) -> bool:
    part = _read_part(folder)
    return part is not None and part.index == 0


def clear_scratch(folder: Path) -> None:
    """Remove what an earlier job spilled and pinned; it means nothing to this one."""
    for name in os.listdir(folder):
        if name.startswith((SCRATCH_PREFIX, PIN_PREFIX)):
            (folder / name).unlink()


def remove(folders: Sequence[Path]) -> None:
    """Remove a store's folders; a file that no store made, and its folder, stay."""
    clear(folders)
    for folder in folders:
        (folder / LOCK_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _listed(names: Sequence[object]) -> str:
    return ", ".join(str(name) for name in names)
