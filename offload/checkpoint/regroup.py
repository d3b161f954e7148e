"""Load a checkpoint whose tensors are divided into other units: tensor by tensor.

    layouts equal             load.copy_into      whole files
    same tensors, other units regroup_into        the byte range of each tensor and role

So what decides the units (thresholds, later the number of ranks) may change between save and load.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.checkpoint.load import Checkpoint, Loaded, progress_bar, told
from offload.errors import StoreCorrupt
from offload.partition.described import tensors_of, units_of
from offload.partition.states import BLOCK_ELEMS, MOMENTS, SCALES, Role
from offload.partition.unit import Slot, Unit, round_up
from offload.store import checksum, durable, files
from offload.store.extents import FileLayout
from offload.store.format import UnitFlag
from offload.store.store import Store

PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class _Move:
    """One role of a tensor, from byte to byte."""

    role: Role
    read_at: int
    write_at: int
    num_bytes: int


def is_regrouped(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True when two layouts hold the same tensors in the same types, perhaps in other units."""
    rest, other_rest = (
        {key: value for key, value in layout.items() if key != "units"} for layout in (one, other)
    )
    return rest == other_rest and tensors_of(one) == tensors_of(other)


def regroup_into(store: Store, checkpoint: Checkpoint) -> Loaded:
    """Copy every tensor to the spare side of its unit; blocks.  Raises as load.copy_into."""
    record = checkpoint.record
    source = files.DataFiles((checkpoint.path,), checkpoint.manifest, read_only=True)
    with told(checkpoint.path), progress_bar(checkpoint) as bar:
        for unit in record.sides:
            for problem in checksum.damage(source, record, unit):
                raise StoreCorrupt(f"{problem}.")
        store.begin()
        regrouping = _Regrouping(store, checkpoint, source, bar.update)
        zero = [unit.name for unit in units_of(store.manifest.layout) if regrouping.fill(unit)]
    sides = {layout.unit: store.spare(layout.unit) for layout in store.manifest.files}
    return Loaded(sides, frozenset(zero), None)


class _Regrouping:
    """Fills units of the store from tensors of the checkpoint."""

    def __init__(
        self, store: Store, checkpoint: Checkpoint, source: files.DataFiles,
        progress: Callable[[int], object],
    ) -> None:  # fmt: skip
        self._store = store
        self._record = checkpoint.record
        self._source = source
        self._progress = progress
        self._places = _places(checkpoint.manifest.layout)

    def fill(self, unit: Unit) -> bool:
        """Copy the tensors of `unit`; True when all of its moments are zero."""
        name = unit.name
        target = self._store.files.layout(name)
        all_zero = True
        with _descriptor(self._store.files.path(name, self._store.spare(name)), os.O_WRONLY) as fd:
            for slot in unit.slots:
                found = self._places[slot.tensor.name]
                source = found[0].name
                zero = UnitFlag.MOMENTS_ZERO in self._record.flags[source]
                all_zero &= zero
                moves = _moves((unit, slot), found, self._source.layout(source), target)
                self._copy(source, fd, moves, zero=zero)
        return all_zero

    def _copy(self, unit: str, fd: int, moves: Iterable[_Move], *, zero: bool) -> None:
        path = self._source.path(unit, self._record.sides[unit])
        with _descriptor(path, os.O_RDONLY) as source:
            for move in moves:
                for start in range(0, move.num_bytes, PIECE_BYTES):
                    size = min(PIECE_BYTES, move.num_bytes - start)
                    if zero and move.role in MOMENTS:
                        data = bytes(size)
                    else:
                        data = _read(source, size, move.read_at + start, path)
                    durable.write_at(fd, data, move.write_at + start)
                    self._progress(size)


_Place = tuple[Unit, Slot]  # a tensor in one layout


def _places(layout: Mapping[str, Any]) -> dict[str, _Place]:
    return {slot.tensor.name: (unit, slot) for unit in units_of(layout) for slot in unit.slots}


def _moves(to: _Place, of: _Place, source: FileLayout, target: FileLayout) -> Iterator[_Move]:
    for role, there in target.roles.items():
        start, stop = _span(*to, role)
        first, _ = _span(*of, role)
        if start < stop <= there.num_bytes:  # frozen: in `param` only
            read_at = source.roles[role].offset + first
            yield _Move(role, read_at, there.offset + start, stop - start)


def _span(unit: Unit, slot: Slot, role: Role) -> tuple[int, int]:
    """The bytes of a tensor in the flat buffer of `role`; of its scales, each block's."""
    stop = slot.stop
    if role in SCALES:
        stop = round_up(stop, BLOCK_ELEMS)
    return unit.byte_of(role, slot.start), unit.byte_of(role, stop)


def _read(fd: int, num_bytes: int, offset: int, path: Path) -> bytes:
    data = os.pread(fd, num_bytes, offset)
    if len(data) != num_bytes:
        raise StoreCorrupt(f"{path}: expected {num_bytes} bytes at {offset}, got {len(data)}.")
    return data


@contextlib.contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
