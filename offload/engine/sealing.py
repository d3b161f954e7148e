"""Checksums of a generation: what the update summed, completed by frozen tensors (DESIGN D3).

    | written by the update: sums from its job | frozen: sums of before |      one role of a unit
    the block in which both meet is joined from both

A unit's frozen bytes are read once at most: their sums come from the side that is committed.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.crc import BLOCK_BYTES, Tail
from offload.optim.jobs import Job
from offload.partition.unit import Role, Unit
from offload.store import checksum
from offload.store.extents import RoleRange
from offload.store.store import Store


class Sealer:
    """Fills checksum extents; used by whoever commits, one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tails: dict[tuple[str, Role], Tail] = {}
        self.first: Mapping[str, int] = {}  # digests of the initial weights

    def seal_update(self, unit: Unit, side: int, job: Job, number: int) -> int:
        """Seal what unit `number` of an ended job wrote to `side`; return the digest."""
        return checksum.seal(self._store.files, unit.name, side, self.sums_of(unit, job, number))

    def sums_of(self, unit: Unit, job: Job, number: int) -> dict[Role, bytes]:
        """The sums of the roles that unit `number` of an ended job wrote."""
        layout = self._store.files.layout(unit.name)
        sums = {}
        for role, found in job.checksums(number).items():
            tail = self._tail(unit.name, role, layout.constants.get(role))
            sums[role] = (tail.complete(found) if tail is not None else found).tobytes()
        return sums

    def seal_written(self, unit: str, side: int, *, moments: bool) -> int:
        """Seal a side by reading it back."""
        sums = checksum.sums_of(self._store.files, unit, side, moments=moments)
        return checksum.seal(self._store.files, unit, side, sums)

    def forget(self) -> None:
        """Frozen tensors have changed."""
        self._tails.clear()

    def _tail(self, unit: str, role: Role, constant: tuple[int, int] | None) -> Tail | None:
        if constant is None:
            return None
        if (unit, role) not in self._tails:
            self._tails[unit, role] = self._make_tail(unit, role, constant[0])
        return self._tails[unit, role]

    def _make_tail(self, unit: str, role: Role, start: int) -> Tail:
        files, record = self._store.files, self._store.committed
        assert record is not None
        layout, path = files.layout(unit), files.path(unit, record.sides[unit])
        place = layout.roles[role]
        if not checksum.is_sealed(record, unit):
            with _mapped(path, place) as data:
                return Tail.of(data[start:], start)
        known = checksum.read_sums(path, layout, record.checksums[unit])[role]
        whole: NDArray[np.uint64] = np.frombuffer(known, np.uint64)
        first = -(-start // BLOCK_BYTES)  # the first block that is frozen altogether
        stop = min(first * BLOCK_BYTES, place.num_bytes)
        with _mapped(path, place) as data:
            border = Tail.of(data[start:stop], start)
        return Tail(start, border.open_sum, border.open_bytes, whole[first:])


@contextlib.contextmanager
def _mapped(path: Path, place: RoleRange) -> Iterator[memoryview]:
    """The bytes of one role of a file, not copied."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
        view[place.offset : place.offset + place.num_bytes] as data,
    ):
        yield data
