"""Checksums of data: one per 1 MiB store block, and one over them in the commit record (DESIGN D3).

block ... block          data of one extent; the last block ends with the data
  |         |
[sum] ... [sum]          8 bytes each, in the file's checksum extent
  '----+----'
     digest              in the commit record: an old extent cannot pass for a new one
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from offload.errors import StoreCorrupt
from offload.store import durable
from offload.store.extents import CHECKSUM_BLOCK_BYTES, CHECKSUM_BYTES, SIDE_NAMES, FileLayout
from offload.store.files import DataFiles
from offload.store.format import Record, UnitFlag


def seal(files: DataFiles, unit: str, side: int, sums: bytes | None = None) -> int:
    """Fill the checksum extent of a written side; return the digest that its commit needs.

    `sums`: 8 bytes little-endian for each block, roles in order, as whoever wrote the data
    computed them; None reads the data back.
    """
    layout, path = files.layout(unit), files.path(unit, side)
    if sums is None:
        sums = _sums_of(path, layout)
    if len(sums) != layout.num_blocks * CHECKSUM_BYTES:
        raise ValueError(
            f"checksums of unit {unit!r}: expected {layout.num_blocks * CHECKSUM_BYTES} bytes, "
            f"got {len(sums)}."
        )
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        durable.write_at(fd, sums, layout.checksum_offset)
    finally:
        os.close(fd)
    return zlib.crc32(sums)


def is_sealed(record: Record, unit: str) -> bool:
    """Tell whether the record vouches for the unit's checksums."""
    return UnitFlag.CHECKSUMS in record.flags[unit]


def read_sums(path: Path, layout: FileLayout, digest: int) -> bytes:
    """Return the checksums of a sealed side; raises StoreCorrupt unless `digest` is theirs."""
    with path.open("rb", buffering=0) as file:
        file.seek(layout.checksum_offset)
        sums = file.read(layout.num_blocks * CHECKSUM_BYTES)
    if zlib.crc32(sums) != digest:
        raise StoreCorrupt(
            f"unit {layout.unit!r} ({path}): its checksums are not those that were committed."
        )
    return sums


def damage(files: DataFiles, record: Record, unit: str) -> Iterator[str]:
    """Read a sealed unit whole and name each block that is not what was committed."""
    layout, side = files.layout(unit), record.sides[unit]
    path = files.path(unit, side)
    where = f"unit {unit!r}, side {SIDE_NAMES[side]} ({path.name})"
    try:
        expected = read_sums(path, layout, record.checksums[unit])
        found = _sums_of(path, layout)
    except StoreCorrupt:
        yield f"{where}: its checksums are not those that were committed"
        return
    except OSError as error:
        yield f"{where}: cannot be read: {error.strerror}"
        return
    for position, (role, block, start, _) in enumerate(_blocks(layout)):
        at = slice(position * CHECKSUM_BYTES, (position + 1) * CHECKSUM_BYTES)
        if found[at] != expected[at]:
            yield f"{where}: {role}, block {block} (at byte {start} of the file) is damaged"


def _blocks(layout: FileLayout) -> Iterator[tuple[str, int, int, int]]:
    """Role, number, offset in the file, bytes: of each store block."""
    for role, place in layout.roles.items():
        for block in range(place.num_blocks):
            start = block * CHECKSUM_BLOCK_BYTES
            num_bytes = min(CHECKSUM_BLOCK_BYTES, place.num_bytes - start)
            yield role.value, block, place.offset + start, num_bytes


def _sums_of(path: Path, layout: FileLayout) -> bytes:
    sums = bytearray()
    block_buffer = memoryview(bytearray(CHECKSUM_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        for _, _, start, num_bytes in _blocks(layout):
            # A short read (a cut file) leaves other bytes here, and so another sum.
            done = os.preadv(file.fileno(), [block_buffer[:num_bytes]], start)
            sums += struct.pack("<Q", zlib.crc32(block_buffer[:done]))
    return bytes(sums)
