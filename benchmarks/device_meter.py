"""What an engine holds on its device, counted without its help: as a mode under which it trains.

    weights      storages of units, in use or put aside
    gradients    what backward makes in the shape of a parameter, for as long as anybody holds it

Batches must be such that no activation has the shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from offload import OffloadEngine


class DeviceMeter(TorchDispatchMode):
    """`peak`: the most bytes at any operation of a backward on this thread."""

    def __init__(self, engine: OffloadEngine) -> None:
        super().__init__()
        self.peak = 0
        parts = engine._parts
        small = parts.ground.persistent
        self._units = [*parts.residency.bound, *([small.bound] if small is not None else [])]
        shapes = {slot.tensor.shape for unit in self._units for slot in unit.unit.slots}
        self._shapes = shapes | {shape[::-1] for shape in shapes}
        self._made: list[tuple[StorageWeakRef, int]] = []  # and their bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        found = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:  # in backward
            given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
            for each in _tensors(found):
                storage = each.untyped_storage()
                if tuple(each.shape) in self._shapes and storage._cdata not in given:
                    self._made.append((StorageWeakRef(storage), storage.nbytes()))
            self._made = [made for made in self._made if not made[0].expired()]
            weights = sum(unit.weight_bytes for unit in self._units if unit._flat is not None)
            self.peak = max(self.peak, weights + sum(size for _, size in self._made))
        return found


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return filter(torch.is_tensor, tree_iter(tree))
