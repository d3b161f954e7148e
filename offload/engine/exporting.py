"""A living engine's weights as `offload.interchange.export` wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.config import DTYPES
from offload.engine.connect import Ground, Parts
from offload.engine.reader import current
from offload.errors import ConfigError
from offload.interchange.export import Exportable, Held, Stored, check_dtype
from offload.interchange.notes import ModelNotes
from offload.interchange.read_ahead import WeightStream
from offload.interchange.safetensors_file import TensorEntry
from offload.masters import dtype_of, moved_dtype, rounded
from offload.partition.unit import Role, Unit
from offload.store.files import Extent


class _Current:
    """The generation that readers see; waits for a unit's update."""

    def __init__(self, ground: Ground) -> None:
        self._ledger = ground.ledger

    def place(self, unit: Unit, role: Role) -> Extent:
        return self._ledger.place(unit.index, role)


def exportable(parts: Parts, model: nn.Module, *, dtype: Any, notes: ModelNotes) -> Exportable:
    """Everything that `state_dict` has.  `dtype`: a name or a torch.dtype; None: what moves."""
    ground = parts.ground
    chosen = _chosen_dtype(dtype, ground.blueprint.config.dtype)
    sources: dict[str, tuple[TensorEntry, Stored | Held]] = {}
    small = ground.persistent.unit if ground.persistent else None
    for unit in ground.blueprint.units:
        for slot in unit.slots:
            name = slot.tensor.name
            source: Stored | Held = Stored(unit, slot)
            own = moved_dtype(unit.states.weights) if dtype is None else chosen
            if unit is small:
                source = _held(parts, name, own)
            key = notes.renamed.get(name, name)
            sources[key] = (TensorEntry(key, slot.tensor.shape, own), source)
    managed = ground.blueprint.found.parameters
    others = {name: p for name, p in model.named_parameters() if name not in managed}
    buffers = dict(model.named_buffers())
    for name, tensor in {**others, **{name: buffers[name] for name in notes.buffers}}.items():
        key = notes.renamed.get(name, name)
        sources[key] = (TensorEntry(key, tuple(tensor.shape), tensor.dtype), tensor.cpu)
    stream = WeightStream(ground.queue, _Current(ground))
    return Exportable(sources, stream, notes, chosen, lambda: _check_current(ground))


def _check_current(ground: Ground) -> None:
    with current(ground.store):
        pass


def _chosen_dtype(dtype: Any, default: torch.dtype) -> torch.dtype:
    if dtype is None:
        return default
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"export: expected dtype bf16, fp16 or fp32, got {dtype!r}.")
    return check_dtype(found)


def _held(parts: Parts, name: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    unit, _ = parts.reader.find(name)
    if dtype is dtype_of(unit.states.weights, Role.PARAM):
        return lambda: parts.reader.tensor_of(name, Role.PARAM)
    return lambda: rounded(parts.reader.master(name), dtype)
