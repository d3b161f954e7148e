"""Load a checkpoint whose tensors are divided into other units: tensor by tensor.

    layouts equal             load.copy_into      whole files
    same tensors, other units regroup_into        the byte range of each tensor and role
    frozen there, not here    regroup_into        masters are what moved, states are zero

So what decides the units (thresholds, later the number of ranks) may change between save and load,
and a store that grows takes over what the one before it holds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    read_at: int | None  # None: there is nothing to read, all is zero
    write_at: int
    num_bytes: int
    widen: bool = False  # what is read are fp16 weights, what is written are fp32 masters


def is_regrouped(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True when `one` can take the tensors of `other`: in the same types, perhaps in other units.

    Those that are trained in `other` must be so in `one`.
    """
    rest, other_rest = (
        {key: value for key, value in layout.items() if key != "units"} for layout in (one, other)
    )
    return (
        rest == other_rest
        and _without_training(one) == _without_training(other)
        and (trained_in(other) <= trained_in(one))
    )


def trained_in(layout: Mapping[str, Any]) -> set[str]:
    """Names of the tensors that have state."""
    return {name for name, told in tensors_of(layout).items() if told["trainable"]}


def with_trained(layout: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """`layout` with states of `names` too; only the tensors are right in it, not their places."""
    units = [
        {**unit, "tensors": [_trained(tensor, names) for tensor in unit["tensors"]]}
        for unit in layout["units"]
    ]
    return {**layout, "units": units}


def _trained(tensor: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {**tensor, "trainable": tensor["trainable"] or tensor["name"] in names}


def _without_training(layout: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {**told, "trainable": None} for name, told in tensors_of(layout).items()}


def regroup_into(
    store: Store, checkpoint: Checkpoint, folders: Sequence[Path] | None = None
) -> Loaded:  # fmt: skip
    """Copy every tensor to the spare side of its unit; blocks.  Raises as load.copy_into.

    `folders`: of its files, where it is a store of several.
    """
    record = checkpoint.record
    source = files.DataFiles(folders or (checkpoint.path,), checkpoint.manifest, read_only=True)
    with told(checkpoint.path), progress_bar(checkpoint) as bar:
        for unit in (unit for unit in record.sides if checksum.is_sealed(record, unit)):
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
                    if move.read_at is None or (zero and move.role in MOMENTS):
                        data = bytes(size)
                    elif move.widen:
                        half = _read(source, size // 2, move.read_at + start // 2, path)
                        data = np.frombuffer(half, np.float16).astype(np.float32).tobytes()
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
        if not start < stop <= there.num_bytes:  # frozen: in `param` only
            continue
        write_at, num_bytes = there.offset + start, stop - start
        unit, slot = of
        if slot.tensor.trainable or role in unit.states.weights.fetched:
            first, _ = _span(unit, slot, role)
            yield _Move(role, source.roles[role].offset + first, write_at, num_bytes)
        elif role is Role.MASTER:
            first, _ = _span(unit, slot, Role.PARAM)
            read_at = source.roles[Role.PARAM].offset + first
            yield _Move(role, read_at, write_at, num_bytes, widen=True)
        else:
            yield _Move(role, None, write_at, num_bytes)


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
