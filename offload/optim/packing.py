"""Where a whole tensor's states lie in its unit's state stream: one after the other, fp32.

    unit    [ w0: 3 x 4        | w1: 5           ]
    stream  [ col_var 4 | row_var 3 | variance 5 ]      each start on a multiple of 16 elements

Row and column factors of matrices take a few elements a row; the stream is as long as they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from offload.partition.unit import Unit, round_up

ALIGN_ELEMS = 16  # a cache line of fp32
Shapes = Mapping[str, tuple[int, ...]]


def num_state_elems(shapes: Shapes) -> int:
    """Elements that the states of one tensor take in a packed stream."""
    return sum(round_up(math.prod(shape), ALIGN_ELEMS) for shape in shapes.values())


@dataclass(frozen=True)
class Piece:
    """One state tensor of one parameter."""

    start: int  # elements from the stream's first
    shape: tuple[int, ...]

    def of(self, stream: Tensor) -> Tensor:
        """Its elements of `stream` (num_elems,) fp32; shares memory."""
        return stream[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Packing:
    """The packed state stream of one unit."""

    pieces: Mapping[str, Mapping[str, Piece]]  # by parameter, then by state
    shapes: Mapping[str, tuple[int, ...]]  # of the parameters; a 0-dimensional one is (1,)
    num_elems: int

    @classmethod
    def of(cls, unit: Unit, state_shapes: Callable[[Sequence[int], str], Shapes]) -> Packing:
        """Lay out the states of a unit's trainable tensors: `state_shapes(shape, name)`."""
        pieces: dict[str, dict[str, Piece]] = {}
        start = 0
        trainable = [slot.tensor for slot in unit.slots if slot.tensor.trainable]
        for tensor in trainable:
            pieces[tensor.name] = own = {}
            for state, shape in state_shapes(tensor.shape, f"parameter {tensor.name}").items():
                own[state] = Piece(start, shape)
                start = round_up(start + math.prod(shape), ALIGN_ELEMS)
        shapes = {tensor.name: tensor.shape or (1,) for tensor in trainable}
        return cls(pieces, shapes, start)
