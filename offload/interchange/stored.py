"""What a store, or a checkpoint, holds: opened to be read by others than its engine.

folders  --> manifest, record --> units from the layout --> Exportable
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import aio
from offload.config import DTYPES
from offload.errors import StoreError
from offload.interchange.export import Exportable, Held, Stored
from offload.interchange.notes import ModelNotes
from offload.interchange.read_ahead import WeightStream
from offload.interchange.safetensors_file import TensorEntry
from offload.masters import moved_dtype
from offload.partition.described import units_of
from offload.partition.unit import Role, Unit
from offload.store import folder, recover
from offload.store.commits import CommitLog
from offload.store.files import DataFiles, Extent
from offload.store.format import Manifest, Record, decode_manifest

_PREFIX = "offload-"


@dataclass(frozen=True)
class Source:
    """A generation that is open for reading."""

    manifest: Manifest
    record: Record
    files: DataFiles = field(repr=False)
    log: CommitLog = field(repr=False)

    def place(self, unit: Unit, role: Role) -> Extent:
        return self.files.extent(unit.name, role, self.record.sides[unit.name])

    def check_unchanged(self) -> None:
        """Raise StoreError if a training job has begun to overwrite what was read."""
        if not self.log.holds(self.record.sequence):
            raise StoreError(
                f"store {self.manifest.name!r}: generation {self.record.generation} was overwritten"
                " while it was read. Export from the job itself, from a checkpoint, or after it"
                " ends."
            )


@contextlib.contextmanager
def open_source(folders: Sequence[Path]) -> Iterator[Source]:
    """Open a store by its folders (one for each of its drives) or a checkpoint by its folder.

    Raises StoreError or StoreCorrupt.  Takes no lock.
    """
    with contextlib.ExitStack() as closing:
        manifest, places = _find(folders)
        log = CommitLog(places[0], manifest, read_only=True)
        closing.callback(log.close)
        record = recover.newest_record(log, manifest)
        files = DataFiles(places, manifest, read_only=True)
        closing.callback(files.close)
        if recover.lost_by_power(record):
            recover.check_survived(files, record, manifest)
        files.open(record.sides)
        yield Source(manifest, record, files, log)


def _find(folders: Sequence[Path]) -> tuple[Manifest, tuple[Path, ...]]:
    found = [path for path in folders if (path / folder.MANIFEST_NAME).is_file()]
    if not found:
        raise StoreError(
            f"{', '.join(map(str, folders))}: expected a store's folder ({_PREFIX}NAME) or a"
            " checkpoint, got neither. Name the folder with the file MANIFEST."
        )
    path = found[0] / folder.MANIFEST_NAME
    manifest = decode_manifest(path.read_bytes(), str(path))
    if manifest.num_paths == 1:
        return manifest, (found[0],)
    name = found[0].name.removeprefix(_PREFIX)
    everything = folder.find([path.resolve().parent for path in folders], name)
    return manifest, recover.order_folders(everything, manifest)


def exportable(
    source: Source, queue: aio.Queue, *, state: Mapping[str, Any], dtype: torch.dtype | None
) -> Exportable:
    """All that `source` knows of a model.  `state`: its decoded payload; `dtype` None: what moves.

    Parameters of other types than bf16, fp16 and fp32 are not in a store, and so not here.
    """
    layout = source.manifest.layout
    chosen = dtype or DTYPES[layout["dtype"]]  # None: tensors that stay fp32 are fp32
    notes = ModelNotes.decode(state["model"]) if "model" in state else ModelNotes()
    sources: dict[str, tuple[TensorEntry, Stored | Held]] = {}
    for unit in units_of(layout):
        for slot in unit.slots:
            key = notes.renamed.get(slot.tensor.name, slot.tensor.name)
            own = dtype or moved_dtype(unit.states.weights)
            sources[key] = (TensorEntry(key, slot.tensor.shape, own), Stored(unit, slot))
    for name in notes.buffers:
        buffer: torch.Tensor = state["buffers"][name]
        sources[name] = (TensorEntry(name, tuple(buffer.shape), buffer.dtype), buffer.cpu)
    return Exportable(sources, WeightStream(queue, source), notes, chosen, source.check_unchanged)
