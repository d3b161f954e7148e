"""What steps leave in memory with durability="none", until the store is closed or saved.

    step       update in place, in host memory ---- remember(): the generation counts here alone
    write()    every buffer that has changed ----> its extent; checksums; one commit

Nothing is read or written in between for what stays; a process that dies goes back to the last
`write()`, or, where other buffers were written in place meanwhile, loses the state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import aio
from offload.errors import StoreError
from offload.memory.slab import Region
from offload.metrics import Metrics
from offload.partition.unit import Role, Unit
from offload.store import checksum
from offload.store.format import Record
from offload.store.store import Store

_PHASE = "save"  # of the bytes in the metrics


class WriteBack:
    """Owns what memory alone holds.  Called by whoever commits, one thread at a time."""

    def __init__(
        self, store: Store, queue: aio.Queue, metrics: Metrics, *,
        units: Mapping[int, Unit], regions: Mapping[tuple[int, Role], Region],
        unwritten: Collection[tuple[int, Role]],
    ) -> None:  # fmt: skip
        """`regions`: where buffers are now; `unwritten`: those that steps do not write."""
        self._store = store
        self._queue = queue
        self._metrics = metrics
        self._units = units
        self._regions = regions
        self._unwritten = unwritten
        self._sums: dict[int, Mapping[Role, bytes]] = {}  # of what was written, by changed unit
        self._saved = -1  # the generation that the store has had last
        self._lost = False

    def leaves(self, unit: int, role: Role) -> bool:
        """True when steps leave this buffer in memory."""
        return (unit, role) in self._unwritten

    @property
    def active(self) -> bool:
        """True when generations count in memory until `write`."""
        return bool(self._unwritten)

    def remember(
        self, generation: int, payload: bytes, sums: Mapping[int, Mapping[Role, bytes]]
    ) -> Record:
        """Make a step's generation count here.  `sums`: checksums of what it wrote, by unit."""
        self._note_saved()
        sides = {self._units[unit].name: 0 for unit in sums}
        record = self._store.commit(
            sides=sides, generation=generation, payload=payload, in_memory=True
        )
        self._sums.update(sums)
        return record

    def write(self) -> None:
        """Bring what has changed to the store, and commit; nothing where nothing has.

        No update may be under way.  Raises StoreError from a failed transfer, after which the
        store takes nothing more; and where memory holds no generation.
        """
        self.check()
        record = self._store.committed
        if not self._sums or record is None:
            return
        names = {unit: self._units[unit].name for unit in self._sums}
        self._store.begin(names.values())
        self._finish([ticket for unit in names for ticket in self._submit(unit)])
        digests = {}
        for unit, name in names.items():
            sums = {**self._sums[unit], **self._sums_in_memory(unit)}
            digests[name] = checksum.seal(self._store.files, name, 0, sums)
        self._store.commit(
            sides=dict.fromkeys(names.values(), 0), generation=record.generation,
            payload=record.payload, checksums=digests,
        )  # fmt: skip
        self._sums.clear()

    def forget(self) -> None:
        """The store holds another generation of everything that had changed."""
        self._sums.clear()

    def give_up(self) -> None:
        """An update was dropped half-way: memory holds no generation any more."""
        if self.active:
            self._note_saved()
            self._lost = True

    def check(self) -> None:
        """Raise StoreError where memory holds no generation."""
        if self._lost:
            raise StoreError(
                f"store {self._store.folders[0]}: expected a whole generation in memory, got one"
                ' whose step was lost half-way with durability="none". The last save is generation'
                f" {self._saved}: close the engine, and resume it or load a checkpoint."
            )

    def _note_saved(self) -> None:
        if not self._sums and self._store.committed is not None:
            self._saved = self._store.committed.generation

    def _finish(self, tickets: Sequence[aio.Ticket]) -> None:
        """Wait for all; one that failed leaves a side that nobody knows."""
        failed: aio.IOFailed | None = None
        for ticket in tickets:
            try:
                ticket.wait()
            except aio.IOFailed as error:
                failed = failed or error
        if failed is not None:
            self._store.poison(failed)
            raise StoreError(
                f"store {self._store.folders[0]}: what memory alone holds cannot be saved:"
                f" {failed}. Remove the cause and load a checkpoint, or go on from one saved"
                " elsewhere."
            ) from failed

    def _submit(self, unit: int) -> list[aio.Ticket]:
        tickets = []
        for role in self._roles(unit):
            extent = self._store.extent(self._units[unit].name, role, 0)
            memory = self._regions[unit, role].part(0, extent.num_bytes).view
            tickets.append(self._queue.write(extent.file, memory, extent.offset))
            self._metrics.write_bytes[f"{_PHASE}.{role.value}"] += extent.num_bytes
        return tickets

    def _sums_in_memory(self, unit: int) -> dict[Role, bytes]:
        sums = {}
        for role in self._roles(unit):
            blocks = checksum.BlockSums()
            blocks.add(self._regions[unit, role].view[: self._units[unit].role_bytes(role)])
            sums[role] = blocks.finish()
        return sums

    def _roles(self, unit: int) -> list[Role]:
        found = self._units[unit]
        return [role for role in found.roles if self.leaves(unit, role) and found.role_bytes(role)]
