"""Checksums of data: one per 1 MiB store block, and one over them in the commit record (DESIGN D3).

block ... block          data of one extent; the last block ends with the data
  |         |
[sum] ... [sum]          8 bytes each, in the file's checksum extent
  '----+----'
     digest              in the commit record: an old extent cannot pass for a new one

Moments that are zero and were never written have sums of zero, which nobody compares.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from offload.crc import crc32
from offload.errors import StoreCorrupt
from offload.partition.states import MOMENTS, Role
from offload.store import durable
from offload.store.extents import (
    CHECKSUM_BLOCK_BYTES,
    CHECKSUM_BYTES,
    SIDE_NAMES,
    FileLayout,
    RoleRange,
)
from offload.store.files import DataFiles
from offload.store.format import Record, UnitFlag


class BlockSums:
    """Sums of the blocks of one role, whose bytes come in order and in pieces of any size."""

    def __init__(self) -> None:
        self._sums = bytearray()
        self._open_sum = 0
        self._open_bytes = 0

    def add(self, data: memoryview) -> None:
        while data:
            piece = data[: CHECKSUM_BLOCK_BYTES - self._open_bytes]
            self._open_sum = crc32(piece, self._open_sum)
            self._open_bytes += len(piece)
            data = data[len(piece) :]
            if self._open_bytes == CHECKSUM_BLOCK_BYTES:
                self._close()

    def finish(self) -> bytes:
        """Return 8 bytes for each block, the last of which ends here."""
        if self._open_bytes:
            self._close()
        return bytes(self._sums)

    def _close(self) -> None:
        self._sums += struct.pack("<Q", self._open_sum)
        self._open_sum = self._open_bytes = 0


def seal(files: DataFiles, unit: str, side: int, sums: Mapping[Role, bytes]) -> int:
    """Fill the checksum extent of a written side; return the digest that its commit needs.

    `sums`: 8 bytes little-endian for each block of a role, as whoever wrote the data computed
    them; a role that is not there was not written.
    """
    layout = files.layout(unit)
    joined = b"".join(
        _checked(unit, role, place, sums.get(role, bytes(place.num_blocks * CHECKSUM_BYTES)))
        for role, place in layout.roles.items()
    )
    fd = os.open(files.path(unit, side), os.O_WRONLY | os.O_CLOEXEC)
    try:
        durable.write_at(fd, joined, layout.checksum_offset)
    finally:
        os.close(fd)
    return zlib.crc32(joined)


def _checked(unit: str, role: Role, place: RoleRange, sums: bytes) -> bytes:
    if len(sums) != place.num_blocks * CHECKSUM_BYTES:
        raise ValueError(
            f"checksums of unit {unit!r}, {role.value}: expected "
            f"{place.num_blocks * CHECKSUM_BYTES} bytes, got {len(sums)}."
        )
    return sums


def sums_of(files: DataFiles, unit: str, side: int, *, moments: bool = True) -> dict[Role, bytes]:
    """Read a written side back and return its sums by role, as `seal` wants them."""
    layout = files.layout(unit)
    roles = [role for role in layout.roles if moments or role not in MOMENTS]
    return {role: _sums_of(files.path(unit, side), layout.roles[role]) for role in roles}


def is_sealed(record: Record, unit: str) -> bool:
    """Tell whether the record vouches for the unit's checksums."""
    return UnitFlag.CHECKSUMS in record.flags[unit]


def read_sums(path: Path, layout: FileLayout, digest: int) -> dict[Role, bytes]:
    """Return the checksums of a sealed side; raises StoreCorrupt unless `digest` is theirs."""
    with path.open("rb", buffering=0) as file:
        file.seek(layout.checksum_offset)
        joined = file.read(layout.num_blocks * CHECKSUM_BYTES)
    if zlib.crc32(joined) != digest:
        raise StoreCorrupt(
            f"unit {layout.unit!r} ({path}): its checksums are not those that were committed."
        )
    sums: dict[Role, bytes] = {}
    for role, place in layout.roles.items():
        sums[role], joined = (
            joined[: place.num_blocks * CHECKSUM_BYTES],
            joined[place.num_blocks * CHECKSUM_BYTES :],
        )
    return sums


def compared_roles(layout: FileLayout, flags: UnitFlag) -> list[Role]:
    """The roles whose data means something."""
    zero = UnitFlag.MOMENTS_ZERO in flags
    return [role for role in layout.roles if not (zero and role in MOMENTS)]


def damage(files: DataFiles, record: Record, unit: str) -> Iterator[str]:
    """Read a sealed unit whole and name each block that is not what was committed."""
    layout, side = files.layout(unit), record.sides[unit]
    path = files.path(unit, side)
    where = f"unit {unit!r}, side {SIDE_NAMES[side]} ({path.name})"
    try:
        expected = read_sums(path, layout, record.checksums[unit])
        roles = compared_roles(layout, record.flags[unit])
        found = {role: _sums_of(path, layout.roles[role]) for role in roles}
    except StoreCorrupt:
        yield f"{where}: its checksums are not those that were committed"
        return
    except OSError as error:
        yield f"{where}: cannot be read: {error.strerror}"
        return
    for role in roles:
        for block in range(layout.roles[role].num_blocks):
            at = slice(block * CHECKSUM_BYTES, (block + 1) * CHECKSUM_BYTES)
            if found[role][at] != expected[role][at]:
                start = layout.roles[role].offset + block * CHECKSUM_BLOCK_BYTES
                yield (
                    f"{where}: {role.value}, block {block} (at byte {start} of the file) is damaged"
                )


def _sums_of(path: Path, place: RoleRange) -> bytes:
    sums = BlockSums()
    buffer = memoryview(bytearray(CHECKSUM_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        for start in range(0, place.num_bytes, CHECKSUM_BLOCK_BYTES):
            num_bytes = min(CHECKSUM_BLOCK_BYTES, place.num_bytes - start)
            # A short read (a cut file) leaves other bytes here, and so another sum.
            os.preadv(file.fileno(), [buffer[:num_bytes]], place.offset + start)
            sums.add(buffer[:num_bytes])
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sums.finish()
