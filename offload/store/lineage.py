"""A store that grew: another layout of the same tensors, in a store under a second name.

    <name>  --grow-->  <name>.grown  --grow-->  <name> ...

The successor is filled and committed, at the generation of the one that it replaces, before that
one is removed.  So at any instant there is a whole store under one of the two names; where both
are left, they hold the same, until one is opened: that removes the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import StoreError
from offload.store import build, folder
from offload.store.commits import CommitLog
from offload.store.format import Manifest, Record, decode_manifest
from offload.store.lock import FolderLock, release

Paths = Sequence[str | os.PathLike[str]]
_GROWN = ".grown"
_LOG = logging.getLogger(__name__)


def names_of(name: str) -> tuple[str, str]:
    """The names that a store called `name` may lie under."""
    return name, name + _GROWN


def newest(paths: Paths, name: str) -> str:
    """The name under which it lies; where none is, `name`."""
    found = [(each, *_peek(paths, each)) for each in names_of(name)]
    whole = [(record.generation, each) for each, _, record in found if record is not None]
    if whole:
        return max(whole)[1]
    return next((each for each, manifest, _ in found if manifest is not None), name)


def successor(paths: Paths, name: str) -> str:
    """The name for a store that replaces the newest."""
    first, second = names_of(name)
    return second if newest(paths, name) == first else first


def layout_of(paths: Paths, name: str) -> Mapping[str, Any] | None:
    """The layout of the newest store; None: there is none."""
    manifest, _ = _peek(paths, newest(paths, name))
    return None if manifest is None else manifest.layout


def discard_others(paths: Paths, name: str, kept: str) -> None:
    """Remove what a replaced store has left under the other name; `kept` is ours."""
    for each in names_of(name):
        folders = folder.find(paths, each).occupied
        if each == kept or not folders:
            continue
        locks: list[FolderLock] = []
        try:
            locks.extend(FolderLock(store_folder) for store_folder in folders)
        except StoreError:
            _LOG.warning("store %s: left as it is, somebody uses it", folders[0])
            release(locks)
            continue
        build.discard(folders, locks)


def _peek(paths: Paths, name: str) -> tuple[Manifest | None, Record | None]:
    """What a store of this name is and holds, as far as it can be read."""
    manifest = record = None
    with contextlib.suppress(StoreError, OSError):
        where = folder.find(paths, name).manifest
        if where is not None:
            manifest = decode_manifest(where.read_bytes(), str(where))
            with contextlib.closing(CommitLog(where.parent, manifest, read_only=True)) as log:
                record, _ = log.read()
    return manifest, record
