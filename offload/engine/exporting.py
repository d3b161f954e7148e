"""A living engine's weights as `offload.interchange.export` wants them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.config import DTYPES
from offload.engine.connect import Ground, Parts
from offload.engine.reader import current
from offload.errors import ConfigError
from offload.interchange.export import (
    SINGLE,
    Exportable,
    Held,
    Stored,
    check_dtype,
    export_safetensors,
    export_torch_file,
)
from offload.interchange.notes import ModelNotes
from offload.interchange.read_ahead import WeightStream
from offload.interchange.safetensors_file import TensorEntry
from offload.masters import dtype_of, moved_dtype, rounded
from offload.partition.unit import Role, Unit
from offload.store.files import Extent

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine


class _Current:
    """The generation that readers see; waits for a unit's update."""

    def __init__(self, ground: Ground) -> None:
        self._ledger = ground.ledger

    def place(self, unit: Unit, role: Role) -> Extent:
        return self._ledger.place(unit.index, role)


def exportable(parts: Parts, model: nn.Module, *, dtype: Any, notes: ModelNotes) -> Exportable:
    """Everything that `state_dict` has.  `dtype`: a name or a torch.dtype; None: what moves.

    What steps leave in memory is written to the store first.
    """
    ground = parts.ground
    if ground.ledger.write_back.active:
        ground.ledger.finish()
        ground.ledger.write_back.write()
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


def save_weights(engine: OffloadEngine, path: Path, *, without_frozen: bool) -> None:
    """Write the weights, in the type that moves, to one file, which replaces what is there.

    `path`: a state dict in torch's format, or safetensors, as its name ends.  They stream.
    """
    engine._check_open()
    notes, module = engine._notes, engine.module
    model = exportable(engine._parts, module, dtype=None, notes=notes)
    if without_frozen:
        named = module.named_parameters(remove_duplicate=False)
        frozen = {notes.renamed.get(name, name) for name, p in named if not p.requires_grad}
        sources = {key: source for key, source in model.sources.items() if key not in frozen}
        tied = {name: of for name, of in notes.tied.items() if notes.renamed.get(of, of) in sources}
        renamed = {name: key for name, key in notes.renamed.items() if key in sources}
        model = replace(model, sources=sources, notes=replace(notes, tied=tied, renamed=renamed))
    beside = path.parent / f".{path.name}.saving"
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
    try:
        if path.suffix == ".safetensors":
            export_safetensors(model, beside, max_shard_bytes=1 << 62)
            os.replace(beside / SINGLE, path)
        else:
            os.replace(export_torch_file(model, beside), path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


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
