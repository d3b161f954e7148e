"""A unit: the tensors that are fetched, used and evicted together (DESIGN section 3).

    tensors (named_parameters() order)  --lay out-->  slots in one flat buffer per role

      [ trainable 0 | pad | trainable 1 | pad | ... | frozen 0 | pad | ... ]
        ^ every start on a multiple of 64 elements      ^ only in `param`

The offsets are the same in every role, so one (start, length) names a tensor in all of them; how
many bytes an element has may differ by role and section (states.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offload.partition.states import (
    BLOCK_ELEMS,
    FP32_MOMENTS,
    SCALE_BYTES,
    SCALES,
    SECTION_ELEMS,
    STATES,
    StateTable,
)
from offload.partition.states import STORE_ALIGN_BYTES as STORE_ALIGN_BYTES
from offload.partition.states import Role as Role
from offload.partition.weights import EXACT

ALIGN_ELEMS = 64
STATE_ROLES = FP32_MOMENTS.roles
ELEM_BYTES = {Role.PARAM: 2, Role.MASTER_LO: 2, Role.EXP_AVG: 4, Role.EXP_AVG_SQ: 4}
"""Bytes of an element of the halves, and of fp32 states."""


@dataclass(frozen=True)
class TensorSpec:
    """A parameter as the partitioner sees it."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    plain: bool = False  # its state stays fp32 where that of others is packed
    state_elems: int = 0  # fp32 values of all its states, where states are of whole tensors
    fp32: bool = False  # stays fp32 in a model of 16 bits; all of a unit do, or none
    tied: bool = False  # several modules have it, and its gradient waits for all of their parts

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
    states: StateTable = FP32_MOMENTS
    packed_elems: int = 0  # where the plain section begins; 0: nothing is packed

    def role_elems(self, role: Role) -> int:
        """Elements of the flat buffer of `role`, padding included."""
        # Frozen tensors have what moves: their low halves only where whole weights do.
        return self.num_elems if role in self.states.weights.fetched else self.trainable_elems

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of its file, in order."""
        return self.states.roles

    def byte_of(self, role: Role, elem: int) -> int:
        """Where element `elem` lies in the flat buffer of `role`; for scales: that of its block.

        States of whole tensors lie tensor by tensor: `elem` is the start or the stop of one.
        """
        if role in SCALES:
            return min(elem, self.packed_elems) // BLOCK_ELEMS * SCALE_BYTES
        if role in STATES and self.states.whole:
            before = (slot.tensor for slot in self.slots if slot.start < elem)
            return sum(4 * tensor.state_elems for tensor in before)
        if role in STATES:
            packed = min(elem, self.packed_elems)
            plain_bytes = (elem - packed) * self.states.state_bytes(packed=False)
            return packed * self.states.state_bytes(packed=True) + plain_bytes
        return self.states.weights.elem_bytes(role) * elem

    def role_bytes(self, role: Role) -> int:
        """Bytes of the flat buffer of `role`, padding to store blocks left out."""
        return self.byte_of(role, self.role_elems(role))

    def is_packed(self, elem: int) -> bool:
        """Tell whether the state of element `elem` is in eight bits."""
        return elem < self.packed_elems

    @property
    def tied_elems(self) -> int:
        """Elements of trainable tensors that are tied."""
        tensors = (slot.tensor for slot in self.slots)
        return sum(each.num_elems for each in tensors if each.tied and each.trainable)

    @property
    def num_tensor_elems(self) -> int:
        """Parameters, padding left out."""
        return sum(slot.tensor.num_elems for slot in self.slots)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def lay_out(
    name: str, index: int, tensors: Iterable[TensorSpec], *,
    states: StateTable = FP32_MOMENTS,
) -> Unit:  # fmt: skip
    """Place `tensors` (in `named_parameters()` order) in a unit: trainable first, then frozen.

    Those that stay fp32 move whole.  Where an update writes weights without reading them (fp16),
    frozen ones begin with a block of the store.

    Where `states` packs, the trainable ones that are not plain come before those that are.
    """
    tensors = list(tensors)
    if any(tensor.fp32 for tensor in tensors):
        states = replace(states, weights=EXACT)
    slots: list[Slot] = []
    packed = [t for t in tensors if t.trainable and states.packs and not t.plain]
    packed_end = round_up(_place(packed, slots, 0, BLOCK_ELEMS), SECTION_ELEMS)
    kept = {tensor.name for tensor in packed}
    plain = [t for t in tensors if t.trainable and t.name not in kept]
    trainable_end = _place(plain, slots, packed_end, ALIGN_ELEMS)
    frozen = [t for t in tensors if not t.trainable]
    if frozen and states.weights.made:  # written without being read: no block may hold both
        trainable_end = round_up(trainable_end, STORE_ALIGN_BYTES // ELEM_BYTES[Role.PARAM])
    end = _place(frozen, slots, trainable_end, ALIGN_ELEMS)
    return Unit(name, index, tuple(slots), trainable_end, end, states, packed_end)


def _place(tensors: Iterable[TensorSpec], slots: list[Slot], start: int, align: int) -> int:
    """Append the slots of `tensors` from element `start` on; return where the last one ends."""
    for tensor in tensors:
        slots.append(Slot(tensor, start))
        start += round_up(tensor.num_elems, align)
    return start
