"""Gradients leave the device when their unit is complete, and are kept until the step is validated.

    p.grad (compute_dtype, DEVICE)  --round to dtype-->  kept, HOST: first micro-step as it is, else fp32 sum
                                                         or spilled to DISK, chunk by chunk, in that form

A unit's kept gradients lie at the same offsets as its state, so the update reads them as one more role.  The norm of each
tensor is accumulated over what is kept, in the pass that keeps it (DESIGN 5b "Norm").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import aio
from offload import kernels
from offload.errors import StateError
from offload.memory.slab import Region, Slots
from offload.metrics import Metrics
from offload.partition.chunk import Chunk, Segment, chunks_of, segments_of
from offload.partition.unit import STORE_ALIGN_BYTES, Slot, Unit, round_up
from offload.runtime.binding import BoundUnit
from offload.runtime.device import Device


@dataclass
class KeptUnit:
    """Where one unit's gradients are kept, and which tensors have one in this step."""

    unit: Unit
    region: Region | None  # HOST; None: spilled
    first_tensor: int  # index of the unit's first tensor in the norm table
    file: aio.File | None = None  # of spilled gradients
    has_grad: set[str] = field(default_factory=set)  # tensors with a contribution in this step
    written: set[int] = field(
        default_factory=set
    )  # spilled chunks that hold something of this step
    tickets: dict[int, aio.Ticket] = field(default_factory=dict)  # spill writes by chunk


@dataclass(frozen=True)
class GradFormat:
    """How gradients are kept."""

    rounded: torch.dtype  # of each contribution when it leaves the device (DESIGN N2)
    kept: torch.dtype  # bf16 for one micro-step in bf16, else float32

    @property
    def elem_bytes(self) -> int:
        return self.kept.itemsize


class GradientKeeper:
    """Owns all kept gradients.  Called from backward hooks, one at a time, and from step()."""

    def __init__(
        self, kept: Sequence[KeptUnit], grad_format: GradFormat, *,
        queue: aio.Queue, device: Device, slots: Slots, chunk_elems: int,
        deadline: Callable[[], int], wait: Callable[[int], None], metrics: Metrics,
    ) -> None:  # fmt: skip
        """`wait(unit)` returns when the last update no longer reads the unit's kept gradients."""
        self.format = grad_format
        self._kept = {unit.unit.index: unit for unit in kept}
        self._queue = queue
        self._device = device
        self._slots = slots
        self._chunk_elems = chunk_elems
        self._deadline = deadline
        self._wait = wait
        self._metrics = metrics
        self._spills: list[tuple[KeptUnit, Chunk, Region]] = []  # oldest first; each holds a slot
        self.norm = kernels.Norm(sum(len(unit.unit.slots) for unit in kept))

    def __getitem__(self, unit: int) -> KeptUnit:
        return self._kept[unit]

    def take(self, bound: BoundUnit) -> None:
        """Move the gradients that `bound` has now into what is kept, and clear them."""
        kept = self._kept[bound.unit.index]
        grads: dict[str, torch.Tensor] = {}
        for slot, parameter in zip(bound.unit.slots, bound.parameters, strict=True):
            grad = parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise StateError(
                    f"gradient of {slot.tensor.name!r}: expected a dense tensor, got a sparse one."
                    " Use sparse=False in the embedding."
                )
            grads[slot.tensor.name] = self._device.to_host(grad)
        if not grads:
            return
        self._check_micro_steps(kept, grads)
        self._wait(bound.unit.index)
        if kept.region is not None:
            self._take_in_memory(kept, grads)
        else:
            self._take_spilled(kept, grads)
        kept.has_grad.update(grads)
        for parameter in bound.parameters:
            parameter.grad = None

    def copy_of(self, name: str) -> torch.Tensor | None:
        """A HOST copy of a tensor's kept gradient, in its shape and in the kept format; None: none."""
        for kept in self._kept.values():
            for slot in kept.unit.slots:
                if slot.tensor.name == name and name in kept.has_grad:
                    return self._read(kept, slot).view(slot.tensor.shape)
        return None

    def _read(self, kept: KeptUnit, slot: Slot) -> torch.Tensor:
        if kept.region is not None:
            flat = kept.region.tensor(self.format.kept, kept.unit.trainable_elems)
            return flat[slot.start : slot.stop].clone()
        self.settle()
        assert kept.file is not None
        size = self.format.elem_bytes
        start = slot.start * size // STORE_ALIGN_BYTES * STORE_ALIGN_BYTES
        stop = round_up(slot.stop * size, STORE_ALIGN_BYTES)
        with aio.Buffer(stop - start) as buffer:
            self._queue.read(kept.file, buffer.view, start, deadline=self._deadline()).wait()
            data = bytearray(buffer.view[slot.start * size - start : slot.stop * size - start])
        return torch.frombuffer(data, dtype=self.format.kept)

    def index(self, kept: KeptUnit, slot: Slot) -> int:
        """The tensor's index in the norm table."""
        return kept.first_tensor + kept.unit.slots.index(slot)

    def settle(self) -> None:
        """Wait until every spilled gradient is on disk; raises what went wrong."""
        while self._spills:
            self._retire()

    def clear(self) -> None:
        """Forget the step's gradients."""
        self.settle()
        for kept in self._kept.values():
            kept.has_grad.clear()
            kept.written.clear()

    def _check_micro_steps(self, kept: KeptUnit, grads: dict[str, torch.Tensor]) -> None:
        again = kept.has_grad & grads.keys()
        if again and self.format.kept is not torch.float32:
            raise StateError(
                f"gradient of {min(again)!r}: a second contribution came in one step, but gradients"
                " are kept in 16 bits for a single micro-step."
                " Set gradient_accumulation_steps to the number of backward passes of a step."
            )

    def _take_segment(
        self, kept: KeptUnit, segment: Segment, grads: dict[str, torch.Tensor], dst: torch.Tensor
    ) -> None:
        name = segment.slot.tensor.name
        accumulate = name in kept.has_grad
        if segment.tensor_start == 0:
            self.norm.reset(self.index(kept, segment.slot))
        src = grads[name][segment.tensor_start : segment.tensor_start + segment.num_elems]
        kernels.grad_take(
            src, dst, round_to=self.format.rounded, accumulate=accumulate,
            norm=self.norm, index=self.index(kept, segment.slot),
        )  # fmt: skip

    def _take_in_memory(self, kept: KeptUnit, grads: dict[str, torch.Tensor]) -> None:
        assert kept.region is not None
        flat = kept.region.tensor(self.format.kept, kept.unit.trainable_elems)
        whole = Chunk(0, 0, kept.unit.trainable_elems)
        for segment in segments_of(kept.unit, whole):
            if segment.slot.tensor.name in grads:
                dst = flat[segment.chunk_start : segment.chunk_start + segment.num_elems]
                self._take_segment(kept, segment, grads, dst)

    def _take_spilled(self, kept: KeptUnit, grads: dict[str, torch.Tensor]) -> None:
        for chunk in chunks_of(kept.unit.trainable_elems, self._chunk_elems):
            segments = [
                segment
                for segment in segments_of(kept.unit, chunk)
                if segment.slot.tensor.name in grads
            ]
            if not segments:
                continue
            slot = self._spill_slot(kept, chunk)
            flat = slot.tensor(self.format.kept, chunk.num_elems)
            for segment in segments:
                dst = flat[segment.chunk_start : segment.chunk_start + segment.num_elems]
                self._take_segment(kept, segment, grads, dst)
            self._spill(kept, chunk, slot)

    def _spill_slot(self, kept: KeptUnit, chunk: Chunk) -> Region:
        """A slot with what the chunk holds already in this step."""
        while any(owner is kept and other.index == chunk.index for owner, other, _ in self._spills):
            self._retire()  # its bytes must be on disk before they are read back
        while (slot := self._slots.lease()) is None:
            self._retire()
        if chunk.index in kept.written:
            assert kept.file is not None
            view, offset = self._transfer(kept, chunk, slot)
            self._queue.read(kept.file, view, offset, deadline=self._deadline()).wait()
            self._metrics.read_bytes["backward.grad"] += len(view)
        return slot

    def _spill(self, kept: KeptUnit, chunk: Chunk, slot: Region) -> None:
        assert kept.file is not None
        view, offset = self._transfer(kept, chunk, slot)
        ticket = self._queue.write(kept.file, view, offset, deadline=self._deadline())
        self._metrics.write_bytes["backward.grad"] += len(view)
        kept.tickets[chunk.index] = ticket
        kept.written.add(chunk.index)
        self._spills.append((kept, chunk, slot))

    def _transfer(self, kept: KeptUnit, chunk: Chunk, slot: Region) -> tuple[memoryview, int]:
        size = self.format.elem_bytes
        num_bytes = round_up(chunk.num_elems * size, STORE_ALIGN_BYTES)
        return slot.part(0, num_bytes).view, chunk.start * size

    def _retire(self) -> None:
        """Wait for the oldest spill and free its slot."""
        kept, chunk, slot = self._spills.pop(0)
        try:
            kept.tickets.pop(chunk.index).wait()
        finally:
            self._slots.give_back(slot)

    def close(self) -> None:
        """Wait for what is in flight, whatever its outcome."""
        while self._spills:
            with contextlib.suppress(aio.IOFailed):
                self._retire()
