"""Keep autograd from holding weights.

    forward    saved tensor is a view of a unit's storage?  -> keep its place, not its data
    backward   the unit is brought back, the same view is made again

Whatever backward needs comes back this way, whether or not a module's hook foresaw it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from offload.runtime.binding import BoundUnit


class PackedView:
    """A view of a unit's storage, without the storage."""

    __slots__ = ("bound", "offset", "shape", "strides")

    def __init__(self, bound: BoundUnit, tensor: torch.Tensor) -> None:
        self.bound = bound
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.offset = tensor.storage_offset()

    def unpack(self) -> torch.Tensor:
        """The view again; the unit must be present."""
        return self.bound.flat.as_strided(self.shape, self.strides, self.offset)


class SavedViews:
    """The saved-tensor hooks of one engine, pushed for the length of a forward."""

    def __init__(self, present: Mapping[int, BoundUnit], bring_back: Callable[[int], None]) -> None:
        """`present`: units by the identity of their storage; `bring_back(unit)`: in backward."""
        self._present = present
        self._bring_back = bring_back
        self._active: torch.autograd.graph.saved_tensors_hooks | None = None

    def push(self) -> None:
        """Begin to pack what autograd saves on this thread."""
        self._active = self.packing()
        self._active.__enter__()

    def packing(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The same as a context, for a thread of one's own."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def pop(self) -> None:
        """End it; may be called when nothing is pushed."""
        active, self._active = self._active, None
        if active is not None:
            active.__exit__()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | PackedView:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return tensor
        bound = self._present.get(tensor.untyped_storage()._cdata)
        same = bound is not None and tensor.dtype == bound.dtype
        return PackedView(bound, tensor) if bound is not None and same else tensor

    def _unpack(self, packed: torch.Tensor | PackedView) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self._bring_back(packed.bound.unit.index)
        return packed.unpack()
