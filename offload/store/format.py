"""The bytes of the store's own files: encode, and decode with every check (FORMAT.md).

Decoding validates before it computes: magic, version, lengths, checksums, then fields.  What
fails raises `StoreCorrupt` (damage) or `StoreError` (another version).  Pure: no I/O.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from offload.errors import StoreCorrupt, StoreError
from offload.partition.unit import Role
from offload.store.extents import HEADER_BYTES, SIDE_NAMES, FileLayout, UnitExtents, lay_out_file

VERSION = 1
ALGORITHM = "crc32"  # zlib's; named in each file, so that another can follow
DURABILITIES = ("none", "process", "step")

DATA_NAME = re.compile(r"[0-9]{5}-[A-Za-z0-9._-]*\.r[0-9]+\.[AB]")

_DATA_MAGIC = b"OFLDDATA"
_COMMIT_MAGIC = b"OFLDCMIT"
#                      magic version crc store_id algorithm
_PREFIX = struct.Struct("<8s  I       I   16s      16s")
#                         sequence generation meta bytes, crc  payload bytes, crc  flags
_COMMIT = struct.Struct("<Q        Q          I           I    Q              I    I")
#                       unit, rank, ranks, side  file bytes  layout hash  name bytes
_DATA = struct.Struct("<I     I     I      I     Q           32s          I")
_CRC_AT = 12
_FLUSHED = 1
BLANK = bytes(HEADER_BYTES)  # a commit file that holds no record begins with this


class UnitFlag(enum.IntFlag):
    """What a commit record says about one unit."""

    MOMENTS_ZERO = 1  # exp_avg and exp_avg_sq are zero and were not written
    CHECKSUMS = 2  # the checksum extent is filled; `checksums` holds its digest
    SPARE_STALE = 4  # the spare side holds other constants (frozen tensors) than the committed one


@dataclass(frozen=True)
class Record:
    """A committed generation.  The mappings have one entry per unit."""

    sequence: int  # counts records; the newest valid one counts
    generation: int
    sides: Mapping[str, int] = field(hash=False)
    flags: Mapping[str, UnitFlag] = field(hash=False)
    checksums: Mapping[str, int] = field(hash=False)  # of each unit's checksum extent, else 0
    payload: bytes = field(repr=False)  # the engine's state, opaque here
    durability: str
    flushed: bool  # the data was flushed to the drive before this record was written
    boot_id: str


@dataclass(frozen=True)
class Manifest:
    """What never changes in a store.  `layout` is the caller's description of the model."""

    store_id: str  # 32 hex digits
    name: str
    num_sides: int
    num_paths: int
    rank: int
    num_ranks: int
    files: tuple[FileLayout, ...]
    layout: Mapping[str, Any] = field(hash=False, repr=False)

    @cached_property
    def layout_hash(self) -> bytes:
        return hash_layout(self.layout)


def hash_layout(layout: Mapping[str, Any]) -> bytes:
    """SHA-256 of the description in canonical JSON."""
    text = json.dumps(layout, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


# Text files: one line with kind, version and checksum, then JSON that the checksum covers.


def encode_text(kind: str, value: Mapping[str, Any]) -> bytes:
    body = (json.dumps(value, indent=1) + "\n").encode()
    return f"offload-{kind} {VERSION} {ALGORITHM} {zlib.crc32(body):08x}\n".encode() + body


def decode_text(kind: str, data: bytes, where: str) -> dict[str, Any]:
    line, _, body = data.partition(b"\n")
    words = line.decode("ascii", "replace").split()
    if len(words) != 4 or words[0] != f"offload-{kind}":
        raise StoreCorrupt(f"{where}: expected an offload {kind}, got {line[:40]!r}.")
    _check_version(words[1], where)
    if words[2] != ALGORITHM or words[3] != f"{zlib.crc32(body):08x}":
        found = f"{ALGORITHM} {zlib.crc32(body):08x}"
        raise StoreCorrupt(f"{where}: expected checksum {words[2]} {words[3]}, got {found}.")
    value: dict[str, Any] = json.loads(body)
    return value


def encode_manifest(manifest: Manifest) -> bytes:
    files = [
        {
            "unit": file.unit,
            "path": file.path,
            "files": list(file.names),
            "bytes": {role.value: place.num_bytes for role, place in file.roles.items()},
            "offsets": {role.value: place.offset for role, place in file.roles.items()},
            "constants": {role.value: list(span) for role, span in file.constants.items()},
            "checksum_offset": file.checksum_offset,
            "file_bytes": file.file_bytes,
        }
        for file in manifest.files
    ]
    names = ("store_id", "name", "num_sides", "num_paths", "rank", "num_ranks")
    value = {name: getattr(manifest, name) for name in names}
    value |= {"layout_hash": manifest.layout_hash.hex(), "files": files, "layout": manifest.layout}
    return encode_text("store", value)


def decode_manifest(data: bytes, where: str) -> Manifest:
    value = decode_text("store", data, where)
    try:
        num_sides = value["num_sides"]
        entries = enumerate(value["files"])
        manifest = Manifest(
            files=tuple(_decode_file(i, entry, num_sides, where) for i, entry in entries),
            **{name: value[name] for name in ("store_id", "name", "layout", "num_sides")},
            **{name: value[name] for name in ("num_paths", "rank", "num_ranks")},
        )
        expected = value["layout_hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(f"{where}: a field is missing or malformed: {error!r}.") from error
    if manifest.layout_hash.hex() != expected:
        raise StoreCorrupt(f"{where}: the layout does not have the hash written beside it.")
    return manifest


def _decode_file(index: int, entry: Mapping[str, Any], num_sides: int, where: str) -> FileLayout:
    sizes = {Role(role): num_bytes for role, num_bytes in entry["bytes"].items()}
    constants = {Role(role): (span[0], span[1]) for role, span in entry["constants"].items()}
    unit = UnitExtents(entry["unit"], sizes, constants)
    file = lay_out_file(unit, index, path=entry["path"], num_sides=num_sides)
    names = tuple(entry["files"])
    offsets = {role.value: place.offset for role, place in file.roles.items()}
    if (offsets, file.checksum_offset, file.file_bytes) != (
        entry["offsets"],
        entry["checksum_offset"],
        entry["file_bytes"],
    ):
        raise StoreCorrupt(f"{where}: the extents of unit {unit.name!r} contradict their sizes.")
    if any(not 0 <= a <= b <= sizes[role] for role, (a, b) in constants.items()):
        raise StoreCorrupt(f"{where}: the constants of unit {unit.name!r} lie outside its extents.")
    if len(names) != num_sides or not all(DATA_NAME.fullmatch(name) for name in names):
        raise StoreCorrupt(f"{where}: the files of unit {unit.name!r} have odd names: {names}.")
    return replace(file, names=names)


# Binary headers: 4096 bytes; a common prefix whose checksum covers the whole block.


def encode_data_header(manifest: Manifest, file: FileLayout, side: int) -> bytes:
    name = file.unit.encode()[: HEADER_BYTES - _PREFIX.size - _DATA.size]
    ids = (file.index, manifest.rank, manifest.num_ranks, side)
    fields = _DATA.pack(*ids, file.file_bytes, manifest.layout_hash, len(name))
    return _seal(_DATA_MAGIC, manifest.store_id, fields + name)


def check_data_header(block: bytes, manifest: Manifest, file: FileLayout, side: int) -> None:
    """Raise unless `block` is the header of this unit, side and store."""
    where = f"unit {file.unit!r}, side {SIDE_NAMES[side]}"
    _open_sealed(block, _DATA_MAGIC, where)
    if block != encode_data_header(manifest, file, side):
        index, _, _, found = _DATA.unpack_from(block, _PREFIX.size)[:4]
        got = f"unit number {index}, side {SIDE_NAMES[found] if found < 2 else found}"
        raise StoreCorrupt(
            f"{where}: the file belongs elsewhere: expected unit number {file.index} of store "
            f"{manifest.store_id}, got {got} of store {block[16:32].hex()}."
        )


def encode_record(record: Record, manifest: Manifest) -> tuple[bytes, bytes]:
    """Return the header block and the body; the body starts behind the header."""
    units = [file.unit for file in manifest.files]
    meta = json.dumps(
        {
            "boot_id": record.boot_id,
            "durability": record.durability,
            "sides": [record.sides[unit] for unit in units],
            "flags": [int(record.flags[unit]) for unit in units],
            "checksums": [record.checksums[unit] for unit in units],
        }
    ).encode()
    fields = _COMMIT.pack(
        *(record.sequence, record.generation, len(meta), zlib.crc32(meta)),
        *(len(record.payload), zlib.crc32(record.payload), _FLUSHED * record.flushed),
    )
    return _seal(_COMMIT_MAGIC, manifest.store_id, fields), meta + record.payload


def decode_record(data: bytes, manifest: Manifest, where: str) -> Record | None:
    """Return the record in `data` (a whole commit file), or None where there is none.

    Raises `StoreCorrupt` that says what is wrong with it.
    """
    block = data[:HEADER_BYTES]
    if block == BLANK:
        return None
    _open_sealed(block, _COMMIT_MAGIC, where)
    if block[16:32].hex() != manifest.store_id:
        raise StoreCorrupt(f"{where}: the record belongs to store {block[16:32].hex()}.")
    fields = _COMMIT.unpack_from(block, _PREFIX.size)
    sequence, generation, meta_bytes, meta_crc, payload_bytes, payload_crc, flags = fields
    end = HEADER_BYTES + meta_bytes + payload_bytes
    if end > len(data):
        raise StoreCorrupt(f"{where}: expected {end} bytes, got {len(data)}.")
    meta = data[HEADER_BYTES : HEADER_BYTES + meta_bytes]
    payload = data[HEADER_BYTES + meta_bytes : end]
    if zlib.crc32(meta) != meta_crc or zlib.crc32(payload) != payload_crc:
        raise StoreCorrupt(f"{where}: the record of generation {generation} is torn or damaged.")
    value = json.loads(meta)
    return Record(
        sequence=sequence,
        generation=generation,
        sides=_per_unit(value["sides"], range(manifest.num_sides), manifest, where),
        flags={
            unit: UnitFlag(flag)
            for unit, flag in _per_unit(value["flags"], range(8), manifest, where).items()
        },
        checksums=_per_unit(value["checksums"], range(1 << 64), manifest, where),
        payload=payload,
        durability=value["durability"],
        flushed=bool(flags & _FLUSHED),
        boot_id=value["boot_id"],
    )


def _per_unit(
    values: Sequence[int], allowed: range, manifest: Manifest, where: str
) -> dict[str, int]:
    if len(values) != len(manifest.files) or any(value not in allowed for value in values):
        raise StoreCorrupt(f"{where}: the record does not fit the manifest.")
    return {file.unit: value for file, value in zip(manifest.files, values, strict=True)}


def _seal(magic: bytes, store_id: str, fields: bytes) -> bytes:
    prefix = _PREFIX.pack(magic, VERSION, 0, bytes.fromhex(store_id), ALGORITHM.encode())
    block = bytearray((prefix + fields).ljust(HEADER_BYTES, b"\0"))
    struct.pack_into("<I", block, _CRC_AT, zlib.crc32(block))
    return bytes(block)


def _open_sealed(block: bytes, magic: bytes, where: str) -> None:
    if len(block) != HEADER_BYTES or block[:8] != magic:
        raise StoreCorrupt(f"{where}: expected a header {magic!r}, got {block[:8]!r}.")
    _check_version(int.from_bytes(block[8:12], "little"), where)
    algorithm = block[32:48].rstrip(b"\0").decode("ascii", "replace")
    zeroed = block[:_CRC_AT] + bytes(4) + block[_CRC_AT + 4 :]
    found = int.from_bytes(block[_CRC_AT : _CRC_AT + 4], "little")
    if algorithm != ALGORITHM or zlib.crc32(zeroed) != found:
        raise StoreCorrupt(f"{where}: the header is damaged (its checksum does not match).")


def _check_version(found: int | str, where: str) -> None:
    if str(found) != str(VERSION):
        raise StoreError(
            f"{where}: expected format version {VERSION}, got {found}. "
            "Use the release that wrote this store, or another store name."
        )
