"""A unit bound to live parameters: one flat device storage that is emptied and refilled.

    flat storage  [ trainable 0 | pad | trainable 1 | ... | frozen ]   compute_dtype, on the device
    parameters     ^ views of it, for good: eviction frees the storage, a fill brings it back

The storage object stays the same, so that views which autograd saved are valid again after a
refill.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import nn

from offload.partition.unit import Slot, Unit
from offload.runtime.evicted import EvictedParameter


class Presence(enum.Enum):
    """Where the weights of a unit are, as far as the device knows."""

    EVICTED = "storage freed; parameters wear the guard class; only the store (or slots) holds them"
    FILLING = "storage allocated, contents undefined; only the fetch in progress may touch it"
    PRESENT = "storage filled; parameters are plain and readable"


class BoundUnit:
    """Parameters of one unit as views of one storage.  Presence changes in `_move` only."""

    def __init__(
        self, unit: Unit, parameters: Mapping[str, nn.Parameter], *,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.unit = unit
        self.parameters = [parameters[slot.tensor.name] for slot in unit.slots]
        self.flat = torch.empty(unit.num_elems, dtype=dtype, device=device)
        self.presence = Presence.PRESENT
        self._classes = [type(parameter) for parameter in self.parameters]
        self._num_bytes = self.flat.untyped_storage().nbytes()

    @property
    def weight_bytes(self) -> int:
        return self._num_bytes

    @property
    def storage_id(self) -> int:
        return int(self.flat.untyped_storage()._cdata)

    def view(self, slot: Slot) -> torch.Tensor:
        """The weights of one tensor, in its shape."""
        return self.flat[slot.start : slot.stop].view(slot.tensor.shape)

    def bind(self, *, copy: bool) -> None:
        """Make the parameters views of the flat storage; `copy` keeps their values."""
        with torch.no_grad():
            if copy:
                self.flat.zero_()  # padding is read by transfers
            for slot, parameter in zip(self.unit.slots, self.parameters, strict=True):
                view = self.view(slot)
                if copy:
                    view.copy_(parameter.data)
                parameter.data = view

    def begin_fill(self) -> None:
        """EVICTED -> FILLING: allocate the storage."""
        self._move(Presence.EVICTED, Presence.FILLING)
        self._resize(self._num_bytes)

    def end_fill(self) -> None:
        """FILLING -> PRESENT: parameters become plain again."""
        self._move(Presence.FILLING, Presence.PRESENT)
        for parameter, plain in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = plain

    def evict(self, guard: type[EvictedParameter]) -> None:
        """PRESENT or FILLING -> EVICTED: free the storage, dress the parameters in `guard`."""
        self.presence = Presence.EVICTED
        for parameter in self.parameters:
            parameter.__class__ = guard
        self._resize(0)

    def _move(self, expected: Presence, to: Presence) -> None:
        assert self.presence is expected, (self.unit.name, self.presence, to)
        self.presence = to

    def _resize(self, num_bytes: int) -> None:
        # Autograd compares versions of saved views on unpacking; freeing and refilling restores the
        # same values, so it must not count as a modification.
        with torch.autograd._unsafe_preserve_version_counter(self.flat):  # type: ignore[attr-defined]
            self.flat.untyped_storage().resize_(num_bytes)
