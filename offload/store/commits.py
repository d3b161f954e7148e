"""The two commit files: the newest valid record says which side of each unit counts.

    write s       COMMIT.(s mod 2):  blank the header | body | header [flush]
    retire        blank the other file: no record may name a side that is about to be written

The header comes last, so a process that dies leaves the old record or the new one; the
checksums catch what a power loss tears.
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.errors import StoreCorrupt
from offload.store import durable
from offload.store.extents import HEADER_BYTES
from offload.store.folder import COMMIT_NAMES
from offload.store.format import BLANK, Manifest, Record, decode_record, encode_record

RESERVED_BYTES = 1 << 20  # each; a larger record reserves more before it is written


class CommitLog:
    """Reads and writes the commit files of one store."""

    def __init__(self, folder: Path, manifest: Manifest, *, read_only: bool) -> None:
        self._paths = [folder / name for name in COMMIT_NAMES]
        self._manifest = manifest
        self._fds: list[int] = []
        flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        try:
            for path in self._paths:
                self._fds.append(os.open(path, flags))
        except OSError:
            self.close()
            raise

    def read(self) -> tuple[Record | None, list[str]]:
        """Return the newest valid record and what is wrong with the files."""
        records: list[Record] = []
        problems: list[str] = []
        for path, fd in zip(self._paths, self._fds, strict=True):
            try:
                data = os.pread(fd, os.fstat(fd).st_size, 0)
                record = decode_record(data, self._manifest, str(path))
            except StoreCorrupt as error:
                problems.append(str(error))
            else:
                records += [record] if record is not None else []
        return max(records, key=lambda record: record.sequence, default=None), problems

    def write(self, record: Record, *, flush: bool) -> None:
        """Make `record` the newest; the one before it stays valid."""
        fd = self._fds[record.sequence % 2]
        header, body = encode_record(record, self._manifest)
        durable.reserve(fd, HEADER_BYTES + len(body))
        durable.write_at(fd, BLANK, 0)
        durable.write_at(fd, body, HEADER_BYTES)
        durable.write_at(fd, header, 0)
        if flush:
            durable.flush(fd)

    def retire(self, sequence: int) -> None:
        """Blank the file that record `sequence` is in, or would be in."""
        # No flush: after a power loss the record that replaced it is on the drive, and is newer.
        durable.write_at(self._fds[sequence % 2], BLANK, 0)

    def holds(self, sequence: int) -> bool:
        """Tell whether record `sequence` is still there and valid."""
        index = sequence % 2
        data = os.pread(self._fds[index], os.fstat(self._fds[index]).st_size, 0)
        try:
            record = decode_record(data, self._manifest, str(self._paths[index]))
        except StoreCorrupt:
            return False
        return record is not None and record.sequence == sequence

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
