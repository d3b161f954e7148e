"""Gradients leave the device when their unit is complete, and are kept until the step is validated.

    p.grad (compute_dtype, DEVICE)  --round to dtype-->  kept: as it is, or the sum of micro-steps
              (landing.py)                         in HOST memory, or spilled chunk by chunk

A unit's kept gradients lie at the same offsets as its state, so the update reads them as one more
role.  The norm of each tensor is accumulated over what is kept, in the pass that keeps it
(DESIGN 5b).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import aio
from offload import kernels
from offload.errors import StateError
from offload.memory.slab import Region
from offload.partition.chunk import Chunk, chunks_of, segments_of
from offload.partition.unit import STORE_ALIGN_BYTES, Slot, Unit, round_up
from offload.runtime.binding import BoundUnit
from offload.runtime.evicted import gradient_of, set_gradient
from offload.runtime.landing import Landing, keep_here
from offload.runtime.spill import Spiller, SpillFile

_LOG = logging.getLogger(__name__)


@dataclass
class KeptUnit:
    """Where one unit's gradients are kept, and which tensors have one in this step."""

    unit: Unit
    first_tensor: int  # index of the unit's first tensor in the norm table
    dtype: torch.dtype  # that of `round_to` for a single micro-step, else float32
    round_to: torch.dtype  # each contribution is rounded to it once (DESIGN N2)
    region: Region | None = None  # HOST; or
    spill: SpillFile | None = None  # DISK
    has_grad: set[str] = field(default_factory=set)  # tensors with a contribution in this step
    takes: int = 0  # counts changes of what is kept

    def __post_init__(self) -> None:
        self.index_of = {
            slot.tensor.name: self.first_tensor + position
            for position, slot in enumerate(self.unit.slots)
        }


class GradientKeeper:
    """Owns all kept gradients.  Called from backward hooks, one at a time, and from step()."""

    def __init__(
        self, kept: Sequence[KeptUnit], *, landing: Landing,
        spiller: Spiller, wait: Callable[[int], None], scratch: Callable[[str, int], aio.File],
    ) -> None:  # fmt: skip
        """`wait(unit)` returns when the last update no longer reads the unit's kept gradients.
        `scratch(name, num_bytes)` reserves a file for gradients.
        """
        self._kept = {unit.unit.index: unit for unit in kept}
        self._landing = landing
        self._spiller = spiller
        self._wait = wait
        self._scratch = scratch
        self.before_take: Callable[[int], None] = lambda unit: None  # an update may be reading
        self.take_back: Callable[[int], None] = lambda unit: None  # what was lent and edited
        self.norm = kernels.Norm(sum(len(unit.unit.slots) for unit in kept))

    def __getitem__(self, unit: int) -> KeptUnit:
        """What is kept of a unit; waits for what is on its way from the device."""
        self._landing.settle(unit)
        return self._kept[unit]

    def make_room(self) -> None:
        """A unit's gradients are about to be made on the device."""
        self._landing.make_room()

    def take(self, bound: BoundUnit, then: Callable[[], None] = lambda: None) -> None:
        """Move the gradients that `bound` has now into what is kept, and clear them.

        They may still be on their way when this returns; `then()` is called when they are kept.
        """
        kept = self._kept[bound.unit.index]
        found: dict[str, torch.Tensor] = {}
        for slot, parameter in zip(bound.unit.slots, bound.parameters, strict=True):
            grad = gradient_of(parameter)
            if grad is not None:
                _check_plain(slot, grad)
                found[slot.tensor.name] = grad
        if found:
            self.take_back(bound.unit.index)
            self._landing.send(bound.unit, found, self._begin(kept, found, kept.round_to))
            for parameter in bound.parameters:
                set_gradient(parameter, None)
        self._landing.after(bound.unit, then)

    def replace(self, unit: int, grads: Mapping[str, torch.Tensor]) -> None:
        """Keep `grads`, (n,) HOST in the kept form, instead of what is kept for their tensors."""
        for name in grads:
            self.forget(unit, name)
        if grads:
            kept, chunk = self[unit], self._spiller.chunk_elems
            keep_here(kept.unit, grads, self._begin(kept, grads, kept.dtype), chunk=chunk)

    def forget(self, unit: int, name: str) -> None:
        """Make a tensor one without a gradient in this step."""
        kept = self[unit]
        if name in kept.has_grad:
            self.before_take(unit)
            kept.has_grad.remove(name)
            kept.takes += 1

    @property
    def has_gradients(self) -> bool:
        """True when something is kept for the coming step."""
        return self._landing.waiting or any(kept.has_grad for kept in self._kept.values())

    def settled(self, unit: int) -> bool:
        """True when a unit's kept gradients can be read where they are; never waits."""
        spill = self._kept[unit].spill
        return spill is None or self._spiller.settled(spill)

    def settle(self) -> None:
        """Wait until every gradient is kept, spilled ones on disk; raises what went wrong."""
        self._landing.settle()
        self._spiller.settle()

    def clear(self) -> None:
        """Forget the step's gradients."""
        self.settle()
        for kept in self._kept.values():
            kept.has_grad.clear()
            if kept.spill is not None:
                kept.spill.written.clear()

    def close(self) -> None:
        """Wait for what is in flight, whatever its outcome."""
        self._landing.close()
        self._spiller.close()

    def read(self, unit: int, slot: Slot) -> torch.Tensor:
        """A HOST copy, (n,) in the kept form, of a gradient that the unit's tensor has."""
        kept = self[unit]
        if kept.spill is not None:
            return self._spiller.read(kept.spill, slot.start, slot.stop)
        assert kept.region is not None
        flat = kept.region.tensor(kept.dtype, kept.unit.trainable_elems)
        return flat[slot.start : slot.stop].clone()

    def _begin(
        self, kept: KeptUnit, names: Collection[str], round_to: torch.dtype
    ) -> _Taking:  # fmt: skip
        return _Taking(kept, frozenset(names), round_to, self._spiller, self.norm, self._open)

    def _open(self, kept: KeptUnit, names: Collection[str]) -> None:
        """What is kept of a unit is about to change."""
        self.before_take(kept.unit.index)
        self._wait(kept.unit.index)
        if kept.dtype is not torch.float32 and not kept.has_grad.isdisjoint(names):
            self._widen(kept)

    def _widen(self, kept: KeptUnit) -> None:
        """A second contribution came to gradients kept in 16 bits: go on with fp32 sums.

        There is no room for them in the region, so they are spilled, from now on.  With
        gradient_accumulation_steps set, room is planned from the start.
        """
        _LOG.info("unit %r: several micro-steps in one step, sums go to disk.", kept.unit.name)
        num_bytes = round_up(kept.unit.trainable_elems * 4, STORE_ALIGN_BYTES)
        file = self._scratch(f"grad-sum-{kept.unit.index}", num_bytes)
        wide = SpillFile(kept.unit, file, torch.float32)
        for chunk in chunks_of(kept.unit.trainable_elems, self._spiller.chunk_elems):
            if kept.spill is not None:
                narrow = self._spiller.read(kept.spill, chunk.start, chunk.stop)
            else:
                assert kept.region is not None
                flat = kept.region.tensor(kept.dtype, kept.unit.trainable_elems)
                narrow = flat[chunk.start : chunk.stop]
            slot = self._spiller.edit(wide, chunk)
            kernels.convert(narrow, slot.tensor(torch.float32, chunk.num_elems))
            self._spiller.put(wide, chunk, slot)
        kept.dtype, kept.region, kept.spill = torch.float32, None, wide


@dataclass
class _Taking:
    """Gradients of one unit on their way into what is kept: added, or the first ones."""

    kept: KeptUnit
    names: frozenset[str]
    round_to: torch.dtype
    spiller: Spiller
    norm: kernels.Norm
    open: Callable[[KeptUnit, Collection[str]], None]
    begun: bool = False

    def keep(self, chunk: Chunk, pieces: Mapping[str, torch.Tensor]) -> None:
        """Take the HOST `pieces` that lie in `chunk`, by tensor."""
        self._begin()
        kept = self.kept
        if kept.region is not None:
            flat = kept.region.tensor(kept.dtype, kept.unit.trainable_elems)
            self._take(chunk, pieces, flat[chunk.start : chunk.stop])
        elif kept.spill is not None:
            slot = self.spiller.edit(kept.spill, chunk)
            self._take(chunk, pieces, slot.tensor(kept.dtype, chunk.num_elems))
            self.spiller.put(kept.spill, chunk, slot)

    def end(self) -> None:
        """The unit's tensors have a gradient in this step."""
        self._begin()
        self.kept.has_grad.update(self.names)
        self.kept.takes += 1

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.open(self.kept, self.names)

    def _take(
        self, chunk: Chunk, pieces: Mapping[str, torch.Tensor], flat: torch.Tensor
    ) -> None:  # fmt: skip
        kept = self.kept
        for segment in segments_of(kept.unit, chunk):
            name = segment.slot.tensor.name
            if name not in pieces:
                continue
            index = kept.index_of[name]
            if segment.tensor_start == 0:
                self.norm.reset(index)
            kernels.grad_take(
                pieces[name],
                flat[segment.chunk_start : segment.chunk_start + segment.num_elems],
                round_to=self.round_to, accumulate=name in kept.has_grad,
                norm=self.norm, index=index,
            )  # fmt: skip


def _check_plain(slot: Slot, grad: torch.Tensor) -> None:
    if grad.is_sparse:
        raise StateError(
            f"gradient of {slot.tensor.name!r}: expected a dense tensor, got a sparse one."
            " Use sparse=False in the embedding."
        )
    if grad.requires_grad:
        raise StateError(
            f"gradient of {slot.tensor.name!r}: expected a plain tensor, got one made with"
            " create_graph=True, whose graph the engine would drop. Use torch.autograd.grad(loss,"
            " inputs, create_graph=True); for parameters inside `with engine.gathered(...):`."
        )


def drop_graphs(bound: BoundUnit) -> None:
    """Clear gradients that `take` has refused, since they have a graph."""
    for parameter in bound.parameters:
        grad = gradient_of(parameter)
        if grad is not None and grad.requires_grad:
            set_gradient(parameter, None)
