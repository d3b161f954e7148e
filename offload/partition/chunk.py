"""Chunks: the fixed-size pieces in which flat buffers move, and the tensor pieces inside them.

    flat buffer   |---------- C ----------|---------- C ----------|-- rest --|
    tensors       [ a ][      b               ][ c ][          d            ]
    segments      [ a ][ b part 1         ]|[ b2 ][ c ][   d part 1 ]|[ d2  ]

No buffer depends on the largest tensor: a chunk border may cut one anywhere (DESIGN M2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from offload.config import CHUNK_MULTIPLE as CHUNK_MULTIPLE
from offload.partition.unit import Slot, Unit


@dataclass(frozen=True)
class Chunk:
    """Elements [start, start + num_elems) of a unit's flat buffers."""

    index: int
    start: int
    num_elems: int

    @property
    def stop(self) -> int:
        return self.start + self.num_elems


@dataclass(frozen=True)
class Segment:
    """The part of one tensor that lies in one chunk."""

    slot: Slot
    chunk_start: int  # elements from the chunk's first
    tensor_start: int  # elements from the tensor's first
    num_elems: int


def chunks_of(num_elems: int, chunk_elems: int) -> Iterator[Chunk]:
    """Cut `num_elems` elements; the last chunk is shorter."""
    for index, start in enumerate(range(0, num_elems, chunk_elems)):
        yield Chunk(index, start, min(chunk_elems, num_elems - start))


def state_borders(unit: Unit, chunk_elems: int) -> list[int]:
    """Where an update cuts the trainable section: starts, and the end.

    At multiples of `chunk_elems` where state is packed, at those of `plain_chunk` elsewhere, and
    between the two: each chunk has one format and lies in one chunk of the weights.  Nowhere where
    states are of whole tensors.
    """
    packed, end = unit.packed_elems, unit.trainable_elems
    if unit.states.whole:
        return [0, end] if end else [0]
    step = unit.states.plain_chunk(chunk_elems)
    borders = {*range(0, packed, chunk_elems), packed, *range(-(-packed // step) * step, end, step)}
    return [*sorted(border for border in borders if border < end), end]


def state_chunks(unit: Unit, chunk_elems: int) -> Iterator[Chunk]:
    """The chunks of an update."""
    for index, (start, stop) in enumerate(pairwise(state_borders(unit, chunk_elems))):
        yield Chunk(index, start, stop - start)


def segments_of(unit: Unit, chunk: Chunk) -> Iterator[Segment]:
    """The tensor pieces of `chunk`, in order; padding belongs to none."""
    for slot in unit.slots:
        start, stop = max(slot.start, chunk.start), min(slot.stop, chunk.stop)
        if start < stop:
            yield Segment(slot, start - chunk.start, start - slot.start, stop - start)
