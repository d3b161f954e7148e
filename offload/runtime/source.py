"""The values that a model starts with, segment by segment, with the next reads already under way.

    unit, chunk, segment ...   --in a file--->  direct read into one of a few lanes   --> elements
                               --in memory-->  the parameter's own                    -->

Mapped files are read past their mapping: page faults would read small windows, through the page
cache.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import aio
from offload.errors import StoreError
from offload.memory.slab import Region
from offload.partition.chunk import chunks_of, segments_of
from offload.partition.unit import STORE_ALIGN_BYTES, Unit, round_up
from offload.runtime.pages import will_need

LEAST_DIRECT_ELEMS = 1 << 14  # shorter tensors come through their mapping
_AHEAD_ELEMS = 4 << 20
_WIDEST_BYTES = 4  # of an element that is read directly


@dataclass(frozen=True)
class FilePlace:
    """Where a file holds a parameter's elements, in the parameter's order and type."""

    path: Path
    offset: int
    file_bytes: int


@dataclass(frozen=True)
class LoadedModel:
    """A module and the files that hold its values, which nothing has changed since."""

    module: nn.Module
    places: Mapping[str, FilePlace]  # by parameter; a subset


def unpack(model: nn.Module | LoadedModel) -> tuple[nn.Module, Mapping[str, FilePlace]]:
    """The module, and what is known of files that hold its values."""
    return (model.module, model.places) if isinstance(model, LoadedModel) else (model, {})


@dataclass
class _Segment:
    """Elements on their way."""

    elems: torch.Tensor  # (n,) of the parameter, or the lane's memory when `ticket` has ended
    lane: Region | None = None
    ticket: aio.Ticket | None = None


class InitialValues:
    """Reads the values of `parameters`; those with a place directly from its file."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], places: Mapping[str, FilePlace], *,
        queue: aio.Queue, memory: Region, chunk_elems: int,
    ) -> None:  # fmt: skip
        """`memory`: what reads may fill; 16 bytes for each of `chunk_elems` are enough."""
        self._parameters = parameters
        self._places = places
        self._queue = queue
        self._chunk_elems = chunk_elems
        size = round_up(_WIDEST_BYTES * chunk_elems, STORE_ALIGN_BYTES) + 2 * STORE_ALIGN_BYTES
        self._lanes = deque(
            memory.part(start, size) for start in range(0, memory.num_bytes - size + 1, size)
        )
        self._files: dict[Path, aio.File] = {}

    def segments(self, units: Iterable[Unit]) -> Generator[torch.Tensor]:
        """Yield the elements of every segment of every chunk of `units`, in order.

        Each is valid until the next one is asked for.  Raises StoreError where a file cannot be
        read.
        """
        flying: deque[_Segment] = deque()
        ahead = 0
        try:
            for name, start, num_elems in self._cut(units):
                place = self._place(name)
                while flying and (ahead > _AHEAD_ELEMS or (place and not self._lanes)):
                    yield _arrived(flying[0])
                    ahead -= self._forget(flying)
                if place is not None and self._lanes:
                    flying.append(self._read(name, place, start, num_elems))
                else:
                    will_need(self._parameters[name], start, num_elems)
                    flying.append(_Segment(self._own(name)[start : start + num_elems]))
                ahead += num_elems
            while flying:
                yield _arrived(flying[0])
                self._forget(flying)
        finally:
            self._close(flying)

    def _cut(self, units: Iterable[Unit]) -> Iterator[tuple[str, int, int]]:
        for unit in units:
            for chunk in chunks_of(unit.num_elems, self._chunk_elems):
                for segment in segments_of(unit, chunk):
                    yield segment.slot.tensor.name, segment.tensor_start, segment.num_elems

    def _own(self, name: str) -> torch.Tensor:
        return self._parameters[name].detach().reshape(-1)

    def _place(self, name: str) -> FilePlace | None:
        """Where to read directly; None: not worth it, or not possible."""
        place, parameter = self._places.get(name), self._parameters[name]
        if place is None or parameter.numel() < LEAST_DIRECT_ELEMS:
            return None
        fits = parameter.itemsize <= _WIDEST_BYTES and place.offset % parameter.itemsize == 0
        return place if fits else None

    def _read(self, name: str, place: FilePlace, start: int, num_elems: int) -> _Segment:
        file = self._files.get(place.path)
        if file is None:
            file = self._files[place.path] = aio.File(place.path)
        parameter, lane = self._parameters[name], self._lanes.popleft()
        first = place.offset + start * parameter.itemsize
        aligned = first // STORE_ALIGN_BYTES * STORE_ALIGN_BYTES
        stop = round_up(first + num_elems * parameter.itemsize, STORE_ALIGN_BYTES)
        view = lane.part(0, min(stop, place.file_bytes) - aligned).view
        ticket = self._queue.read(file, view, aligned)
        elems = lane.tensor(parameter.dtype, num_elems, offset=first - aligned)
        return _Segment(elems, lane, ticket)

    def _forget(self, flying: deque[_Segment]) -> int:
        """The consumer is through with the oldest one; return how many elements it had."""
        segment = flying.popleft()
        if segment.lane is not None:
            self._lanes.append(segment.lane)
        return len(segment.elems)

    def _close(self, flying: Iterable[_Segment]) -> None:
        """Wait until no transfer touches a lane; what went wrong was told where it mattered."""
        for segment in flying:
            if segment.ticket is not None:
                segment.ticket.cancel()
                with contextlib.suppress(aio.IOFailed):
                    segment.ticket.wait()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _arrived(segment: _Segment) -> torch.Tensor:
    if segment.ticket is not None:
        try:
            segment.ticket.wait()
        except aio.IOFailed as error:
            raise StoreError(
                f"weights cannot be read: {error}. Nothing was changed: repair the file and load"
                " again."
            ) from error
    return segment.elems
