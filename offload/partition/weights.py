"""How a weight and its fp32 master are kept (DESIGN T2, T4).

    moves     param                    beside it            what the device gets
    bfloat16  high half of the master  master_lo, low half  param
    float32   the same                 the same             both: the master
    float16   the master, rounded      master, whole        param

The halves are bf16 and int16.  A whole master is the truth alone: an update writes its weight and
does not read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offload.partition.role import Role

_TYPES = {Role.MASTER_LO: "int16", Role.MASTER: "float32"}
_BYTES = {"bfloat16": 2, "float16": 2, "int16": 2, "float32": 4}


@dataclass(frozen=True)
class Weights:
    """One of the three ways, by what moves: "bfloat16", "float16" or "float32"."""

    dtype: str = "bfloat16"

    @property
    def exact(self) -> bool:
        """Whole fp32 weights move, frozen ones too."""
        return self.dtype == "float32"

    @property
    def apart(self) -> bool:
        """The master is kept whole, beside the weight."""
        return self.dtype == "float16"

    @property
    def master(self) -> Role:
        """What is kept beside the weight."""
        return Role.MASTER if self.apart else Role.MASTER_LO

    @property
    def roles(self) -> tuple[Role, Role]:
        return Role.PARAM, self.master

    @property
    def fetched(self) -> tuple[Role, ...]:
        """What a fetch brings."""
        return self.roles if self.exact else (Role.PARAM,)

    @property
    def updated_from(self) -> tuple[Role, ...]:
        """What an update reads."""
        return (Role.MASTER,) if self.apart else self.roles

    @property
    def made(self) -> tuple[Role, ...]:
        """What an update writes without reading it."""
        return tuple(role for role in self.roles if role not in self.updated_from)

    @property
    def lent(self) -> tuple[Role, ...]:
        """What an update can take from a fetch."""
        return tuple(role for role in self.fetched if role in self.updated_from)

    def decoded_from(self, present: Iterable[Role]) -> tuple[Role, ...]:
        """What fp32 values are made of, where only `present` are kept (frozen: `param` alone)."""
        found = [role for role in self.updated_from if role in present]
        return tuple(found) or (Role.PARAM,)

    def type_of(self, role: Role) -> str:
        """Type of the elements of one of `roles`, by torch's name."""
        return _TYPES.get(role, "float16" if self.apart else "bfloat16")

    def elem_bytes(self, role: Role) -> int:
        """Bytes of an element of one of `roles`."""
        return _BYTES[self.type_of(role)]

    @property
    def fetched_bytes(self) -> int:
        """Bytes of an element of what a fetch brings."""
        return sum(self.elem_bytes(role) for role in self.fetched)

    @property
    def num_bytes(self) -> int:
        """Bytes of an element of both roles."""
        return sum(self.elem_bytes(role) for role in self.roles)


SPLIT, APART, EXACT = Weights("bfloat16"), Weights("float16"), Weights("float32")
