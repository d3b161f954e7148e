"""Gradients on their way from the device to what is kept of them.

    compute   | ... t's ... | ... u's ... | ...
    out                     | t t t t     | u u u u     chunk by chunk, behind what made them
    host                       k k k k       k k k k    each is kept when its copy has ended

A hook gives the copies and returns.  What has arrived is kept by whoever comes next: the next hook,
or step().  Until then it holds a slot of host memory and the gradients on the device; a slot that
lacks, or `room_bytes` that are exceeded, mean waiting for the oldest.  Where the device's memory is
ordinary memory nothing has to move.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from offload.memory.slab import Region, Slots
from offload.metrics import Metrics
from offload.partition.chunk import Chunk, Segment, chunks_of, segments_of
from offload.partition.unit import Unit
from offload.runtime.device import StreamDevice
from offload.runtime.streams import Event


class Receiver(Protocol):
    """Who keeps the gradients of one unit."""

    def keep(self, chunk: Chunk, pieces: Mapping[str, torch.Tensor]) -> None:
        """Take what lies in `chunk`: (n,) HOST, by tensor."""
        ...

    def end(self) -> None:
        """That was all."""
        ...


class Landing(Protocol):
    """How gradients come from the device."""

    @property
    def waiting(self) -> bool:
        """True when something is on its way."""
        ...

    def send(self, unit: Unit, grads: Mapping[str, torch.Tensor], to: Receiver) -> None:
        """Hand over a unit's gradients, of any shape on the device."""
        ...

    def after(self, unit: Unit, action: Callable[[], None]) -> None:
        """Act when all that was sent so far has been kept."""
        ...

    def make_room(self) -> None:
        """Another unit's gradients are about to be made: wait until the device has room."""
        ...

    def settle(self, unit: int | None = None) -> None:
        """Wait until what is on its way has been kept: of one unit, or all."""
        ...

    def close(self) -> None:
        """Wait for copies, whatever their outcome, and forget what they bring."""
        ...


def keep_here(unit: Unit, grads: Mapping[str, torch.Tensor], to: Receiver, *, chunk: int) -> None:
    """Keep HOST gradients at once, `chunk` elements at a time."""
    flats = {name: grad.detach().contiguous().view(-1) for name, grad in grads.items()}
    for each, segments in _cut(unit, flats, chunk):
        to.keep(each, {segment.slot.tensor.name: _part(flats, segment) for segment in segments})
    to.end()


class InPlace:
    """For a device whose memory is ordinary memory."""

    waiting = False

    def __init__(self, *, chunk_elems: int) -> None:
        self._chunk_elems = chunk_elems

    def send(self, unit: Unit, grads: Mapping[str, torch.Tensor], to: Receiver) -> None:
        keep_here(unit, grads, to, chunk=self._chunk_elems)

    def after(self, unit: Unit, action: Callable[[], None]) -> None:
        action()

    def make_room(self) -> None:
        pass

    def settle(self, unit: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Arrival:
    """Something that comes to host memory, or what is to be done when all before it has come."""

    unit: Unit
    keep: Callable[[], None]
    copied: Event | None = None
    slot: Region | None = None

    def done(self) -> bool:
        return self.copied is None or self.copied.done()


class Landed:
    """Copies on a stream of their own.  Called from backward hooks, one at a time, and step()."""

    def __init__(
        self, device: StreamDevice, slots: Slots, *,
        chunk_elems: int, room_bytes: int, metrics: Metrics,
    ) -> None:  # fmt: skip
        """`room_bytes`: of gradients on their way, when those of another unit are about to come."""
        self._device = device
        self._slots = slots
        self._chunk_elems = chunk_elems
        self._room_bytes = room_bytes
        self._metrics = metrics
        self._arrivals: deque[_Arrival] = deque()  # oldest first
        self._num_bytes = 0  # of the device, alive for copies
        self._keeping = False

    @property
    def waiting(self) -> bool:
        return bool(self._arrivals)

    def send(self, unit: Unit, grads: Mapping[str, torch.Tensor], to: Receiver) -> None:
        self._keep_what_came()
        flats = {name: grad.detach().reshape(-1) for name, grad in grads.items()}
        made = self._device.mark()  # reshape may have copied, which is compute's work too
        self._num_bytes += sum(flat.nbytes for flat in flats.values())
        try:
            for chunk, segments in _cut(unit, flats, self._chunk_elems):
                self._copy(unit, chunk, segments, flats, behind=made, to=to)
        except BaseException:
            self.close()
            raise
        # It holds the gradients: nobody frees them before the copies have ended, so that their
        # memory needs no note of the other stream.
        self._arrivals.append(_Arrival(unit, partial(self._end, flats, to)))

    def after(self, unit: Unit, action: Callable[[], None]) -> None:
        if self._arrivals:
            self._arrivals.append(_Arrival(unit, action))
        else:
            action()

    def make_room(self) -> None:
        self._keep_what_came()
        while self._num_bytes > self._room_bytes:
            self._keep_oldest()

    def settle(self, unit: int | None = None) -> None:
        while not self._keeping and any(
            unit in (None, arrival.unit.index) for arrival in self._arrivals
        ):
            self._keep_oldest()

    def close(self) -> None:
        while self._arrivals:
            arrival = self._arrivals.popleft()
            with contextlib.suppress(Exception):
                if arrival.copied is not None:
                    arrival.copied.wait()
            if arrival.slot is not None:
                self._slots.give_back(arrival.slot)
        self._num_bytes = 0

    def _copy(
        self, unit: Unit, chunk: Chunk, segments: Sequence[Segment],
        flats: Mapping[str, torch.Tensor], *, behind: Event, to: Receiver,
    ) -> None:  # fmt: skip
        while (slot := self._slots.lease()) is None:
            self._keep_oldest()
        pieces, pairs = {}, []
        for segment in segments:
            source = _part(flats, segment)
            start = segment.chunk_start * source.itemsize
            host = slot.tensor(source.dtype, segment.num_elems, offset=start)
            pieces[segment.slot.tensor.name] = host
            pairs.append((host, source))
        arrival = _Arrival(unit, partial(to.keep, chunk, pieces), slot=slot)
        self._arrivals.append(arrival)
        arrival.copied = self._device.copy_out(pairs, behind=behind)

    def _end(self, flats: Mapping[str, torch.Tensor], to: Receiver) -> None:
        self._num_bytes -= sum(flat.nbytes for flat in flats.values())
        to.end()

    def _keep_what_came(self) -> None:
        while self._arrivals and self._arrivals[0].done():
            self._keep_oldest()

    def _keep_oldest(self) -> None:
        """Wait for it and keep it; an error of a copy takes all that comes behind it along."""
        arrival = self._arrivals[0]
        try:
            if arrival.copied is not None:
                with self._metrics.stall("gradients", arrival.unit.name):
                    arrival.copied.wait()
        except Exception:
            self.close()
            raise
        self._arrivals.popleft()
        self._keeping = True
        try:
            arrival.keep()
        finally:
            self._keeping = False
            if arrival.slot is not None:
                self._slots.give_back(arrival.slot)


def _cut(
    unit: Unit, grads: Mapping[str, torch.Tensor], chunk_elems: int
) -> Iterator[tuple[Chunk, list[Segment]]]:  # fmt: skip
    """The chunks that hold something of `grads`, and what."""
    for chunk in chunks_of(unit.trainable_elems, chunk_elems):
        found = segments_of(unit, chunk)
        segments = [segment for segment in found if segment.slot.tensor.name in grads]
        if segments:
            yield chunk, segments


def _part(flats: Mapping[str, torch.Tensor], segment: Segment) -> torch.Tensor:
    flat = flats[segment.slot.tensor.name]
    return flat[segment.tensor_start : segment.tensor_start + segment.num_elems]
