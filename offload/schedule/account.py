"""State by kind, before any training: what memory would hold, and what is kept here.

    kind        in memory                          here
    weights     2 bytes a parameter (16 bits)      what moves
    gradients   2                                  as kept until the step is validated
    masters     4 (fp32)                           their low halves, or whole ones
    states      4 each (two moments: 16 in all)    in the format of `state_dtype`

In memory: Adam in mixed precision, as everybody keeps it; with whole fp32 weights there is no
second master.  Frozen tensors have weights alone.  Padding counts here, not in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offload.partition.unit import Role, Unit
from offload.schedule.placement import Formats

FP32_BYTES, HALF_BYTES = 4, 2


@dataclass(frozen=True)
class Account:
    """Bytes by kind: "weights", "gradients", "masters", and the optimizer's states by name."""

    num_params: int
    num_trained: int
    in_memory: Mapping[str, int]
    here: Mapping[str, int]

    def per_param(self, kinds: Mapping[str, int]) -> float:
        """Bytes a parameter of one of the two columns."""
        return sum(kinds.values()) / self.num_params if self.num_params else 0.0


def account(units: Iterable[Unit], formats: Formats) -> Account:
    """Count both columns; `units` with the persistent one."""
    units = list(units)
    tensors = [(unit, slot.tensor) for unit in units for slot in unit.slots]
    trained = sum(tensor.num_elems for _, tensor in tensors if tensor.trainable)
    exact = sum(t.num_elems for unit, t in tensors if unit.states.weights.exact)
    exact_trained = sum(
        t.num_elems for unit, t in tensors if unit.states.weights.exact and t.trainable
    )
    num = sum(tensor.num_elems for _, tensor in tensors)
    in_memory = {
        "weights": HALF_BYTES * (num - exact) + FP32_BYTES * exact,
        "gradients": HALF_BYTES * (trained - exact_trained) + FP32_BYTES * exact_trained,
        "masters": FP32_BYTES * (trained - exact_trained),
        **{name: FP32_BYTES * trained for name in formats.states.names},
    }
    return Account(num, trained, in_memory, _here(units, formats))


def _here(units: Iterable[Unit], formats: Formats) -> dict[str, int]:
    found = {"weights": 0, "gradients": 0, "masters": 0}
    found |= dict.fromkeys(formats.states.names, 0)
    for unit in units:
        found["gradients"] += unit.trainable_elems * formats.grad_of(unit)
        for role in unit.roles:
            found[_kind(role, formats)] += unit.role_bytes(role)
    return found


def _kind(role: Role, formats: Formats) -> str:
    if role is Role.PARAM:
        return "weights"
    states = formats.states
    for position, name in enumerate(states.names):
        own = [roles[position] for roles in (states.states, states.scales) if position < len(roles)]
        if role in own:
            return name
    return "masters"
