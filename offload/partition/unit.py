"""A unit: the tensors that are fetched, used and evicted together (DESIGN section 3).

    tensors (named_parameters() order)  --lay out-->  slots in one flat buffer per role

      [ trainable 0 | pad | trainable 1 | pad | ... | frozen 0 | pad | ... ]
        ^ every start on a multiple of 64 elements      ^ only in `param`

The offsets are the same in every role, so one (start, length) names a tensor in all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

ALIGN_ELEMS = 64
STORE_ALIGN_BYTES = 4096


class Role(enum.Enum):
    """What a flat buffer holds.  The value names it in the store and in messages."""

    PARAM = "param"  # 16-bit weight: the high half of the master
    MASTER_LO = "master_lo"  # low half of the fp32 master, int16
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = (
        "grad"  # kept until the step is validated; spilled to disk where the host budget is short
    )


STATE_ROLES = (Role.PARAM, Role.MASTER_LO, Role.EXP_AVG, Role.EXP_AVG_SQ)
ELEM_BYTES = {Role.PARAM: 2, Role.MASTER_LO: 2, Role.EXP_AVG: 4, Role.EXP_AVG_SQ: 4}


@dataclass(frozen=True)
class TensorSpec:
    """A parameter as the partitioner sees it."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def num_elems(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its unit's flat buffers, in elements."""

    tensor: TensorSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.tensor.num_elems


@dataclass(frozen=True)
class Unit:
    """Tensors that travel together, and their layout.  `index` is the place in the model."""

    name: str
    index: int
    slots: tuple[Slot, ...]
    trainable_elems: int  # elements of the state roles: the padded end of the trainable section
    num_elems: int  # elements of `param`: trainable, then frozen
    exact: bool = (
        False  # frozen tensors keep their low halves too (dtype=float32 moves whole weights)
    )

    def role_elems(self, role: Role) -> int:
        """Elements of the flat buffer of `role`, padding included."""
        whole = role is Role.PARAM or (self.exact and role is Role.MASTER_LO)
        return self.num_elems if whole else self.trainable_elems

    @property
    def num_tensor_elems(self) -> int:
        """Parameters, padding left out."""
        return sum(slot.tensor.num_elems for slot in self.slots)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def lay_out(name: str, index: int, tensors: Iterable[TensorSpec], *, exact: bool = False) -> Unit:
    """Place `tensors` (in `named_parameters()` order) in a unit: trainable first, then frozen."""
    tensors = list(tensors)
    slots: list[Slot] = []
    offset = trainable_end = 0
    for trainable in (True, False):
        for tensor in tensors:
            if tensor.trainable is trainable:
                slots.append(Slot(tensor, offset))
                offset += round_up(tensor.num_elems, ALIGN_ELEMS)
        if trainable:
            trainable_end = offset
    return Unit(name, index, tuple(slots), trainable_end, offset, exact)
