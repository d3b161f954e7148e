"""Copy units between folders in bounded memory, with a checksum of every store block.

    piece: read -> checksum -> write        a few pieces in flight, across the borders of files

The queue is an own one with a small depth, so that a copy in the background takes its share of a
drive and no more.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import aio
from offload.errors import StoreCorrupt
from offload.partition.unit import STORE_ALIGN_BYTES, Role, round_up
from offload.store.checksum import BlockSums
from offload.store.extents import CHECKSUM_BLOCK_BYTES, CHECKSUM_BYTES, SIDE_NAMES, FileLayout

PIECE_BYTES = 4 * CHECKSUM_BLOCK_BYTES
Progress = Callable[[int], None]  # bytes done since the last call


@dataclass(frozen=True)
class Depth:
    """How much of the drives a copy may take."""

    pieces: int  # in flight, reads and writes together: the memory it takes
    reads: int  # blocks in flight
    writes: int


BEHIND_TRAINING = Depth(pieces=4, reads=2, writes=4)
ALONE = Depth(pieces=8, reads=8, writes=8)


@dataclass
class CopyJob:
    """One unit's file: from where to where."""

    layout: FileLayout
    side: int  # of the source, for messages
    source: Path
    target: Path  # reserved, its header written
    roles: Collection[Role] = ()  # those whose data means something
    expected: Mapping[Role, bytes] | None = None  # checksums that the data must have
    sums: dict[Role, bytes] = field(default_factory=dict)  # checksums that it has


@dataclass(frozen=True)
class _Piece:
    job: CopyJob
    role: Role
    first_block: int
    offset: int
    num_bytes: int  # of data
    last: bool  # of its job


def pieces_of(job: CopyJob) -> Iterator[_Piece]:
    """Cut a unit's data into pieces of whole store blocks."""
    cuts = [
        (role, place.offset, start, min(PIECE_BYTES, place.num_bytes - start))
        for role, place in job.layout.roles.items()
        if role in job.roles
        for start in range(0, place.num_bytes, PIECE_BYTES)
    ]
    for index, (role, offset, start, num_bytes) in enumerate(cuts):
        last = index == len(cuts) - 1
        yield _Piece(job, role, start // CHECKSUM_BLOCK_BYTES, offset + start, num_bytes, last=last)


def data_bytes(layouts: Iterable[FileLayout]) -> int:
    """Bytes that `copy` reports as progress."""
    return sum(place.num_bytes for layout in layouts for place in layout.roles.values())


def copy(
    jobs: Iterable[CopyJob], *, backend: str, depth: Depth, progress: Progress,
    finished: Callable[[CopyJob], None],
) -> None:  # fmt: skip
    """Copy the data of `jobs` in order; `finished(job)` when all of one is written.

    Blocks.  Raises StoreCorrupt where data is not what `expected` says, aio.IOFailed, OSError.
    """
    queue = aio.Queue(backend, read_depth=depth.reads, write_depth=depth.writes)
    with contextlib.ExitStack() as closing:
        buffer = closing.enter_context(aio.Buffer(depth.pieces * PIECE_BYTES))
        closing.callback(queue.close)  # before the buffer goes
        slots = [buffer.view[i * PIECE_BYTES :][:PIECE_BYTES] for i in range(depth.pieces)]
        pump = _Pump(queue, deque(slots), progress, finished)
        closing.callback(pump.close)
        pump.run(jobs)


@dataclass(frozen=True)
class _Flight:
    piece: _Piece
    slot: memoryview
    ticket: aio.Ticket
    files: tuple[aio.File, aio.File]  # source, target

    @property
    def data(self) -> memoryview:
        return self.slot[: round_up(self.piece.num_bytes, STORE_ALIGN_BYTES)]


class _Pump:
    """Keeps pieces in flight: about as many reads as writes."""

    def __init__(
        self, queue: aio.Queue, slots: deque[memoryview], progress: Progress,
        finished: Callable[[CopyJob], None],
    ) -> None:  # fmt: skip
        self._queue = queue
        self._slots = slots
        self._progress = progress
        self._finished = finished
        self._reading: deque[_Flight] = deque()
        self._writing: deque[_Flight] = deque()

    def run(self, jobs: Iterable[CopyJob]) -> None:
        for job in jobs:
            pieces = list(pieces_of(job))
            if not pieces:
                self._finished(job)
                continue
            files = aio.File(job.source), aio.File(job.target, "r+")
            for piece in pieces:
                while not self._slots:
                    self._advance()
                self._read(piece, files)
        while self._reading or self._writing:
            self._advance()

    def close(self) -> None:
        """After an error: close the files of what is in flight."""
        for flight in (*self._reading, *self._writing):
            for file in flight.files:
                file.close()

    def _read(self, piece: _Piece, files: tuple[aio.File, aio.File]) -> None:
        slot = self._slots.popleft()
        data = slot[: round_up(piece.num_bytes, STORE_ALIGN_BYTES)]
        ticket = self._queue.read(files[0], data, piece.offset)
        self._reading.append(_Flight(piece, slot, ticket, files))

    def _advance(self) -> None:
        """Turn the oldest read into a write, or free the slot of the oldest write."""
        if self._reading and len(self._writing) <= len(self._reading):
            read = self._reading.popleft()
            read.ticket.wait()
            check(read.piece, read.slot)
            ticket = self._queue.write(read.files[1], read.data, read.piece.offset)
            self._writing.append(replace(read, ticket=ticket))
            return
        written = self._writing.popleft()
        written.ticket.wait()
        self._slots.append(written.slot)
        self._progress(written.piece.num_bytes)
        if written.piece.last:
            for file in written.files:
                file.close()
            self._finished(written.piece.job)


def check(piece: _Piece, data: memoryview) -> None:
    """Add the checksums of a piece to its job's, and compare them with what is expected."""
    job, sums = piece.job, BlockSums()
    sums.add(data[: piece.num_bytes])
    found = sums.finish()
    job.sums[piece.role] = job.sums.get(piece.role, b"") + found
    if job.expected is None:
        return
    first = piece.first_block * CHECKSUM_BYTES
    expected = job.expected[piece.role][first : first + len(found)]
    for at in range(0, len(found), CHECKSUM_BYTES):
        if found[at : at + CHECKSUM_BYTES] != expected[at : at + CHECKSUM_BYTES]:
            block = piece.first_block + at // CHECKSUM_BYTES
            start = at // CHECKSUM_BYTES * CHECKSUM_BLOCK_BYTES
            raise StoreCorrupt(
                f"unit {job.layout.unit!r}, side {SIDE_NAMES[job.side]} ({job.source}): "
                f"{piece.role.value}, block {block} (at byte {piece.offset + start} of the file) "
                "is damaged: its checksum does not match."
            )
