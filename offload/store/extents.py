"""Where each byte of a unit lies: one file per (unit, rank, side), extents in role order.

    0        4096
    | header | param ... | master ... | states ... | scales ... | checksums |
               every part starts and ends on a multiple of 4096 bytes

Both sides of a unit have the same layout and live on the same path.  Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up

HEADER_BYTES = STORE_ALIGN_BYTES
CHECKSUM_BLOCK_BYTES = 1 << 20  # the store block: the piece of an extent that has one checksum
CHECKSUM_BYTES = 8
SIDE_NAMES = "AB"
_MAX_NAME = 48


@dataclass(frozen=True)
class UnitExtents:
    """What the store must hold for one unit: bytes per role, padding left out."""

    name: str
    role_bytes: Mapping[Role, int]
    # Bytes [start, stop) of a role that no step writes (frozen tensors): they must be on each side.
    constants: Mapping[Role, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, unit: Unit) -> UnitExtents:
        role_bytes = {role: unit.role_bytes(role) for role in unit.roles}
        first = {role: unit.byte_of(role, unit.trainable_elems) for role in role_bytes}
        constants = {
            role: (first[role], role_bytes[role])
            for role in role_bytes
            if first[role] < role_bytes[role]
        }
        return cls(unit.name, role_bytes, constants)


@dataclass(frozen=True)
class RoleRange:
    """A role's place in its file.  `num_bytes` counts data; the extent is padded to 4096."""

    offset: int
    num_bytes: int

    @property
    def padded_bytes(self) -> int:
        return round_up(self.num_bytes, STORE_ALIGN_BYTES)

    @property
    def num_blocks(self) -> int:
        """Checksums of this extent; they cover data and no padding."""
        return -(-self.num_bytes // CHECKSUM_BLOCK_BYTES)


@dataclass(frozen=True)
class FileLayout:
    """One unit's file, the same for each side."""

    unit: str
    index: int
    path: int  # which of the store's folders
    names: tuple[str, ...]  # of its files, one per side
    roles: Mapping[Role, RoleRange] = field(hash=False)
    constants: Mapping[Role, tuple[int, int]] = field(hash=False)
    checksum_offset: int
    file_bytes: int

    @property
    def num_blocks(self) -> int:
        return sum(place.num_blocks for place in self.roles.values())


def file_name(unit: str, index: int, *, rank: int, side: int) -> str:
    """A name that is safe on every file system, and that a person recognises."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", unit)[:_MAX_NAME]
    return f"{index:05d}-{readable}.r{rank}.{SIDE_NAMES[side]}"


def lay_out_file(
    unit: UnitExtents, index: int, *, path: int, num_sides: int = 2, rank: int = 0
) -> FileLayout:
    """Place the roles of `unit` behind the header, the checksums behind the roles."""
    names = [file_name(unit.name, index, rank=rank, side=side) for side in range(num_sides)]
    offset = HEADER_BYTES
    roles: dict[Role, RoleRange] = {}
    for role, num_bytes in unit.role_bytes.items():
        roles[role] = RoleRange(offset, num_bytes)
        offset += roles[role].padded_bytes
    num_blocks = sum(place.num_blocks for place in roles.values())
    end = offset + round_up(num_blocks * CHECKSUM_BYTES, STORE_ALIGN_BYTES)
    constants = dict(unit.constants)
    return FileLayout(unit.name, index, path, tuple(names), roles, constants, offset, end)


def spread(
    units: Sequence[UnitExtents],
    free_bytes: Sequence[int],
    num_sides: int,
    rates: Sequence[float] | None = None,
) -> list[FileLayout]:
    """Give each unit the path that would be done with it first, among those with room.

    Bytes per drive in proportion to `rates` (None: all the same), so that the rates add up.  Large
    units choose first: the small ones then even out.  Equal ones keep their order, so neighbours
    lie on different drives.  Where no path has room, the emptiest takes the unit; the caller's
    check of the sums reports it.
    """
    per_path = rates or [1.0] * len(free_bytes)
    used = [0] * len(free_bytes)
    sizes = [lay_out_file(unit, 0, path=0).file_bytes * num_sides for unit in units]
    paths = [0] * len(units)
    for index in sorted(range(len(units)), key=lambda i: -sizes[i]):
        num_bytes = sizes[index]
        fits = [i for i, free in enumerate(free_bytes) if free - used[i] >= num_bytes]
        if fits:
            path = min(fits, key=lambda i: (used[i] + num_bytes) / per_path[i])
        else:
            path = max(range(len(used)), key=lambda i: free_bytes[i] - used[i])
        used[path] += num_bytes
        paths[index] = path
    return [
        lay_out_file(unit, index, path=paths[index], num_sides=num_sides)
        for index, unit in enumerate(units)
    ]
