"""Which generation counts, and the order of writes that keeps that answer true.

    generation g counts ── begin ──> spare sides writable ── commit ──> g+1 counts
                             │                                 │
              g-1's record is retired first            flush data, record, flush

Invariant: every valid record names sides that are whole.  A failure in here leaves it
poisoned: what is on the disk is then known only to the next `open`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from offload.errors import StateError, StoreError
from offload.store.commits import CommitLog
from offload.store.durable import explain
from offload.store.files import DataFiles
from offload.store.format import Manifest, Record, UnitFlag
from offload.store.lock import boot_id


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a commit says that is new.  Units not named in `sides` keep what they had."""

    sides: Mapping[str, int] = field(hash=False)
    generation: int | None = None  # None: the next number
    payload: bytes = field(default=b"", repr=False)
    flags: Mapping[str, UnitFlag] = field(default_factory=dict, hash=False)
    checksums: Mapping[str, int] = field(default_factory=dict, hash=False)


class Generations:
    """Owns the commit files and the state of the current generation."""

    def __init__(
        self, log: CommitLog, files: DataFiles, *, manifest: Manifest, durability: str
    ) -> None:
        self.committed: Record | None = None
        self._log = log
        self._files = files
        self._manifest = manifest
        self._durability = durability
        self._begun = True  # the spare sides may be written
        self._ahead = False  # the disk does not hold `committed`: memory does
        self._refusal: str | None = None  # why nothing more may be committed
        self._broken = False  # a write or flush of our own failed: touch nothing

    @property
    def flushes(self) -> bool:
        """True when a commit waits for the drive: let it run beside compute."""
        return self._durability == "step"

    def adopt(self, record: Record) -> None:
        """Start from the generation that `open` found."""
        self.committed, self._begun = record, False

    def begin(self) -> None:
        """Allow writes to the spare sides: retire the record that names them."""
        self.check_writable()
        if self._begun or self.committed is None:
            return
        with self._poisoning("a generation cannot begin"):
            self._log.retire(self.committed.sequence + 1)
            if self._manifest.num_sides == 1:
                self._log.retire(self.committed.sequence)
        self._begun = True

    def commit(self, changes: Changes, *, in_memory: bool = False) -> Record:
        """Make the generation that `changes` describe the one that counts.

        `in_memory`: in this process alone, for whoever keeps in memory what is not on the disk.
        """
        self.check_writable()
        record = self._next_record(changes, begun=self._begun or in_memory)
        if in_memory:
            self.committed, self._ahead = record, True
            return record
        with self._poisoning(f"generation {record.generation} cannot be committed"):
            if record.flushed:
                self._files.flush(self._unflushed(record))
            self._log.write(record, flush=record.flushed)
        self.committed, self._begun, self._ahead = record, False, False
        return record

    def flush(self) -> None:
        """Make the committed generation survive a power loss, if it is whole and not flushed yet.

        A failed transfer does not forbid it: that concerned sides that are not committed.
        """
        last = self.committed
        overwriting = self._begun and self._manifest.num_sides == 1
        if last is None or last.flushed or overwriting or self._ahead or self._broken:
            return
        record = replace(last, sequence=last.sequence + 1, flushed=True, boot_id=boot_id())
        with self._poisoning(f"generation {last.generation} cannot be flushed"):
            self._files.flush(self._unflushed(record))
            self._log.write(record, flush=True)
        self.committed = record

    def is_current(self) -> bool:
        """False once another process has begun to overwrite what `committed` names."""
        return self.committed is not None and self._log.holds(self.committed.sequence)

    def refuse(self, why: str) -> None:
        """Refuse everything but `close` from now on; the first reason counts."""
        self._refusal = self._refusal or why

    def check_writable(self) -> None:
        if self._refusal is not None:
            raise StoreError(f"store {self._manifest.name!r}: {self._refusal}")

    def close(self) -> None:
        self._log.close()
        self.refuse("it is closed.")

    def _next_record(self, changes: Changes, *, begun: bool) -> Record:
        last = self.committed
        sides = {**(last.sides if last else {}), **changes.sides}
        self._check_sides(sides)
        generation = changes.generation
        if generation is None:
            generation = last.generation + 1 if last else 0
        new = last is None or generation != last.generation or sides != last.sides
        if new and not begun:
            raise StateError(
                f"commit of generation {generation}: expected begin() before its first write."
            )
        flags = dict(last.flags) if last else {}
        sums = dict(last.checksums) if last else {}
        for unit in changes.sides:
            sums[unit] = changes.checksums.get(unit, 0)
            filled = UnitFlag.CHECKSUMS if unit in changes.checksums else UnitFlag(0)
            flags[unit] = changes.flags.get(unit, UnitFlag(0)) | filled
        return Record(
            sequence=last.sequence + 1 if last else 1,
            generation=generation,
            sides=sides,
            flags=flags,
            checksums=sums,
            payload=changes.payload,
            durability=self._durability,
            flushed=self.flushes,
            boot_id=boot_id(),
        )

    def _check_sides(self, sides: Mapping[str, int]) -> None:
        units = {file.unit for file in self._manifest.files}
        odd = sorted(units ^ set(sides))
        odd += [unit for unit in sides if not 0 <= sides[unit] < self._manifest.num_sides]
        if odd:
            raise StateError(
                f"commit: expected a side below {self._manifest.num_sides} for each of "
                f"{len(units)} units, got {sides.get(odd[0])} for unit {odd[0]!r}."
            )

    def _unflushed(self, record: Record) -> list[tuple[str, int]]:
        """The sides of `record` that no flush has covered."""
        last = self.committed
        if last is None or not last.flushed or self._manifest.num_sides == 1:
            return list(record.sides.items())
        return [(unit, side) for unit, side in record.sides.items() if last.sides[unit] != side]

    @contextlib.contextmanager
    def _poisoning(self, what: str) -> Iterator[None]:
        """After a failed write or flush nobody knows what the disk holds: write no more."""
        try:
            yield
        except BaseException as error:
            self._broken = True
            why = f"{what}: {error}"
            if isinstance(error, OSError):
                why = explain(error, what)
            self.refuse(f"{why} Nothing more is written until it is opened again.")
            if isinstance(error, OSError):
                raise StoreError(f"store {self._manifest.name!r}: {why}") from error
            raise
