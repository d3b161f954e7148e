"""Which roles a unit has, and in which format: weights, and the state of an optimizer, as data.

    StateTable(names, dtype)     fp32   [ every trainable tensor: 4 bytes an element a state ]
                                 bf16   [ the same, 2 bytes ]
                                 int8   [ packed: 1 byte, and a scale per 256 elements | plain: 4 ]

Roles that an optimizer lacks are neither reserved nor moved.  Packed tensors come first in a unit,
each from a multiple of 256 elements on, so that no block of a scale belongs to two; plain ones
(norms, biases, embeddings) follow from a multiple of 4096.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.config import CHUNK_MULTIPLE, INT8_CHUNK_MULTIPLE, STATE_DTYPES
from offload.errors import ConfigError
from offload.partition.role import Role as Role
from offload.partition.weights import SPLIT, Weights

STORE_ALIGN_BYTES = 4096
BLOCK_ELEMS = 256  # that share a scale
SCALE_BYTES = 4
SECTION_ELEMS = 4096  # the plain section begins at a multiple: 1 byte an element is a store block
WHOLE_STATE_BYTES = 8  # the most for an element's share of states of whole tensors
_NEVER_NEGATIVE = frozenset({"exp_avg_sq", "sum"})  # by torch's names
_STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


STATES = (Role.EXP_AVG, Role.EXP_AVG_SQ)
SCALES = (Role.EXP_AVG_SCALE, Role.EXP_AVG_SQ_SCALE)
MOMENTS = (*STATES, *SCALES)
"""Roles that are zero at the start, and are not written before the first step."""


@dataclass(frozen=True)
class StateTable:
    """The states of an optimizer, by torch's names, at most two; and how they are kept."""

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    dtype: str = "fp32"
    whole: bool = False  # one role: states of whole tensors, `TensorSpec.state_elems` of each
    weights: Weights = SPLIT

    @classmethod
    def of(cls, names: Sequence[str], dtype: str) -> StateTable:
        """Check; raises ConfigError for a third state or an unknown type."""
        if dtype not in STATE_DTYPES:
            raise ConfigError(f"state_dtype: expected {', '.join(STATE_DTYPES)}, got {dtype!r}.")
        if len(names) > len(STATES):
            raise ConfigError(
                f"optimizer: expected at most {len(STATES)} states, got {', '.join(names)}."
            )
        return cls(tuple(names), dtype)

    @property
    def packs(self) -> bool:
        """True where tensors are kept in eight bits, unless they are plain."""
        return self.dtype == "int8" and bool(self.names)

    @property
    def states(self) -> tuple[Role, ...]:
        return STATES[: len(self.names)]

    @property
    def scales(self) -> tuple[Role, ...]:
        return SCALES[: len(self.names)] if self.packs else ()

    @property
    def roles(self) -> tuple[Role, ...]:
        """Everything that a step writes, in the order of a unit's file."""
        return (*self.weights.roles, *self.states, *self.scales)

    @property
    def chunk_multiple(self) -> int:
        """Elements that a chunk must be a multiple of, so that its transfers are whole pages."""
        return INT8_CHUNK_MULTIPLE if self.packs else CHUNK_MULTIPLE

    def state_bytes(self, *, packed: bool) -> int:
        """Bytes of one element of one state."""
        return 4 if self.packs and not packed else _STATE_BYTES[self.dtype]

    def format(self, role: Role, *, packed: bool) -> str:
        """Type of a state's elements: float32, bfloat16, int8 or uint8."""
        if self.packs and packed:
            name = self.names[STATES.index(role)]
            return "uint8" if name in _NEVER_NEGATIVE else "int8"
        return "bfloat16" if self.dtype == "bf16" else "float32"

    def plain_chunk(self, chunk_elems: int) -> int:
        """Elements of a chunk where states are not packed: half, so that it fits the same slot."""
        return chunk_elems // 2 if self.packs else chunk_elems

    def slot_bytes(self, chunk_elems: int, grad_bytes: int) -> int:
        """Bytes that hold every role of any chunk; `grad_bytes`: of an element's gradient."""
        plain, other = self.plain_chunk(chunk_elems), self.weights.num_bytes + grad_bytes
        if self.whole:
            return plain * (other + WHOLE_STATE_BYTES)
        sizes = [plain * (other + self.state_bytes(packed=False) * len(self.names))]
        if self.packs:
            scales = -(-chunk_elems // BLOCK_ELEMS) * SCALE_BYTES
            each = chunk_elems + -(-scales // STORE_ALIGN_BYTES) * STORE_ALIGN_BYTES
            sizes.append(chunk_elems * other + each * len(self.names))
        return max(sizes)


FP32_MOMENTS = StateTable()
