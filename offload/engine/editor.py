"""Edit weights in place: gather units, let the user write, bring changes back as a new generation.

    gathered(names):  units present and held on the device
    on leaving:       device weights == what the store would fill?  -> nothing to do
                      else: every role copied to the other side, masters of changed elements
                      replaced
                            (the others keep their low bits), commit

The committed side is never written (DESIGN D7).  Frozen tensors, which updates do not copy, are
brought to the former side by the store, before its next use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import aio
from offload import kernels, masters
from offload.engine.generation import encode
from offload.engine.ledger import Ledger
from offload.engine.reader import Reader
from offload.engine.rewriting import commit_rewritten
from offload.errors import StateError
from offload.partition.chunk import Chunk, chunks_of
from offload.partition.states import MOMENTS
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up
from offload.runtime.binding import BoundUnit, accept_edits
from offload.runtime.idle import IdleGradients
from offload.runtime.persistent import PersistentState
from offload.runtime.residency import Residency
from offload.runtime.resident import ResidentBuffers


class Editor:
    """Gathers parameters and writes edits back."""

    def __init__(
        self, residency: Residency, ledger: Ledger, reader: Reader, queue: aio.Queue,
        persistent: PersistentState | None, *,
        idle: IdleGradients, resident: ResidentBuffers, chunk_elems: int,
        capture: Callable[[], Mapping[str, Any]], stop_updates: Callable[[], None],
        catch_up: Callable[[], None],
    ) -> None:  # fmt: skip
        self._residency = residency
        self._ledger = ledger
        self._reader = reader
        self._queue = queue
        self._persistent = persistent
        self._idle = idle
        self._resident = resident
        self._chunk_elems = chunk_elems
        self._capture = capture
        self._stop_updates = stop_updates
        self._catch_up = catch_up  # with the last step, or its weights would count as edits
        self._num_open = 0  # blocks of `gathered`

    @contextlib.contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[None]:
        """Hold the units of `names` on the device for the block, then write changes back."""
        indices = sorted({self._reader.find(name)[0].index for name in names})
        bound = [self._bound(index) for index in indices]
        held: list[BoundUnit] = []
        self._catch_up()
        self._num_open += 1
        try:
            for unit in bound:
                if not self._is_persistent(unit):
                    self._residency.ensure(unit.unit.index)
                    unit.holds += 1
                    held.append(unit)
            self._idle.show()
            yield
            changed = [unit for unit in bound if self._changed(unit)]
            if changed:
                self._write_back(changed)
        finally:
            self._num_open -= 1
            for unit in bound:
                accept_edits(unit)
            for unit in held:
                unit.holds -= 1
                self._residency.evict(unit.unit.index)
                unit.outdate()  # an edit may be more exact than a fill

    @property
    def is_open(self) -> bool:
        """True inside a block."""
        return self._num_open > 0

    def check_closed(self, what: str) -> None:
        """Raise StateError inside a block: what `what` changes would be taken for edits."""
        if self._num_open:
            raise StateError(
                f"{what}: expected no open block of engine.gathered(...), got {self._num_open}."
                " Leave the block first: its edits are written when it ends."
            )

    def _bound(self, index: int) -> BoundUnit:
        if self._persistent is not None and index == self._persistent.unit.index:
            return self._persistent.bound
        return self._residency.bound[index]

    def _is_persistent(self, bound: BoundUnit) -> bool:
        return self._persistent is not None and bound is self._persistent.bound

    def _changed(self, bound: BoundUnit) -> bool:
        """Compare with what a fill would give, bit by bit."""
        for chunk in chunks_of(bound.unit.num_elems, self._chunk_elems):
            live = bound.flat[chunk.start : chunk.stop].detach().cpu()
            if not _same_bits(live, self._stored(bound, chunk)):
                return True
        return False

    def _stored(self, bound: BoundUnit, chunk: Chunk) -> torch.Tensor:
        out = torch.empty(chunk.num_elems, dtype=bound.dtype)
        if bound.unit.states.weights.exact:
            self._reader.master_range(bound.unit, chunk.start, out)
        else:
            kernels.convert(self._reader.weight_range(bound.unit, chunk.start, chunk.stop), out)
        return out

    def _write_back(self, changed: Sequence[BoundUnit]) -> None:
        self._stop_updates()  # those made before step() write to the same side
        self._ledger.finish()
        self._ledger.write_back.write()
        self._ledger.store.begin([bound.unit.name for bound in changed])
        sides: dict[str, int] = {}
        for bound in changed:
            sides[bound.unit.name] = self._ledger.next_side(bound.unit.index)
            self._rewrite(bound, sides[bound.unit.name])
        commit_rewritten(self._ledger, sides, encode(self._capture()))
        self._resident.rewritten(bound.unit.index for bound in changed)

    def _rewrite(self, bound: BoundUnit, side: int) -> None:
        """Copy all roles of a unit to `side`, with the device's weights where they differ."""
        unit = bound.unit
        for chunk in chunks_of(unit.num_elems, self._chunk_elems):
            pieces = {
                role: self._reader.role_range(unit, role, chunk.start, stop)
                for role in unit.states.weights.roles
                if (stop := min(chunk.stop, unit.role_elems(role))) > chunk.start
            }
            self._replace(bound, chunk, pieces)
            for role, piece in pieces.items():
                start = unit.byte_of(role, chunk.start)
                self._write(unit.name, role, side, start, piece.view(torch.uint8))
        if unit.index not in self._ledger.zero_moments:
            self._copy_states(unit, side)

    def _copy_states(self, unit: Unit, side: int) -> None:
        piece_bytes = round_up(2 * self._chunk_elems, STORE_ALIGN_BYTES)
        for role in unit.roles:
            if role not in MOMENTS:
                continue
            num_bytes = unit.role_bytes(role)
            for start in range(0, num_bytes, piece_bytes):
                stop = min(start + piece_bytes, num_bytes)
                piece = self._reader.data_range(unit, role, start, stop)
                self._write(unit.name, role, side, start, piece)

    def _replace(
        self, bound: BoundUnit, chunk: Chunk, pieces: dict[Role, torch.Tensor]
    ) -> None:  # fmt: skip
        live = bound.flat[chunk.start : chunk.stop].detach().cpu()
        changed = live.view(_bits(live)) != (stored := self._stored(bound, chunk)).view(
            _bits(stored)
        )
        weights = bound.unit.states.weights
        fresh = {
            role: torch.empty(chunk.num_elems, dtype=masters.dtype_of(weights, role))
            for role in weights.roles
        }
        masters.encode(weights, live.float(), fresh)
        for role in list(pieces):
            num = len(pieces[role])
            pieces[role] = torch.where(changed[:num], fresh[role][:num], pieces[role])
            if self._is_persistent(bound):
                assert self._persistent is not None
                self._persistent.tensor(role)[chunk.start : chunk.start + num] = pieces[role]

    def _write(self, name: str, role: Role, side: int, offset: int, piece: torch.Tensor) -> None:
        """Write `piece`, uint8, at byte `offset` of a role."""
        at = self._ledger.store.extent(name, role, side)
        with aio.Buffer(round_up(len(piece), STORE_ALIGN_BYTES)) as buffer:
            torch.frombuffer(buffer.view, dtype=torch.uint8, count=len(piece)).copy_(piece)
            self._queue.write(at.file, buffer.view, at.offset + offset).wait()


def _bits(tensor: torch.Tensor) -> torch.dtype:
    return torch.int16 if tensor.dtype.itemsize == 2 else torch.int32


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(_bits(one)), other.view(_bits(other)))
