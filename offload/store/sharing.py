"""Sides whose files somebody else shares (hard links): checkpoints, and copies that are under way.

    save    reserve a new file beside each of its sides, then link that side       no copy
    begin   spare side shared?  the reserved file takes its place, then it may be written
    trim    nobody shares a side any more: what was reserved beside it goes

So a shared file is never written again (FORMAT.md), and a step never meets a full disk.
One thread, the store's owner's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from offload.store.files import DataFiles
from offload.store.format import Manifest


class Sharing:
    """Reserves and puts in place what follows shared files."""

    def __init__(self, files: DataFiles, manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest

    def is_shared(self, unit: str, side: int) -> bool:
        return os.stat(self._files.path(unit, side)).st_nlink > 1

    def reserve(self, sides: Iterable[tuple[str, int]]) -> None:
        """Reserve what will follow `sides`, which are about to be shared: all of them, or none."""
        made = []
        try:
            for unit, side in sides:
                path = self._files.next_path(unit, side)
                if not path.exists():
                    made.append(path)
                    self._files.reserve_next(unit, side)
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise

    def make_writable(self, unit: str, side: int, *, committed: int, stale: bool) -> None:
        """Prepare the spare side `side`: a file of its own that holds the constants.

        `stale`: its constants are not those of the committed side.
        """
        if self.is_shared(unit, side):
            self._files.put_new(unit, side, constants_of=committed)
        elif stale and side != committed:
            self._files.copy_constants(unit, source=committed, target=side)

    def trim(self) -> int:
        """Give back what is reserved beside sides that nobody shares; return its bytes."""
        freed = 0
        for layout in self._manifest.files:
            for side in range(self._manifest.num_sides):
                path = self._files.next_path(layout.unit, side)
                if path.exists() and not self.is_shared(layout.unit, side):
                    freed += path.stat().st_size
                    path.unlink()
        return freed
