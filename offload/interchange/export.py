"""Write a model's weights in files that others read, a piece at a time.

    store --> pieces --> model-00001-of-00003.safetensors, ...     `from_pretrained` reads these
                         config.json, model.safetensors.index.json
    store --> pieces --> pytorch_model.bin                         what `zero_to_fp32` users expect

Files appear under their names when they are whole; the index comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from offload.errors import ConfigError, StoreError
from offload.interchange.backing import BackingFile
from offload.interchange.file_stream import FileStream, remove_partial, write_small
from offload.interchange.notes import ModelNotes
from offload.interchange.read_ahead import PIECE_ELEMS, WeightStream
from offload.interchange.safetensors_file import TensorEntry, encode_header, split_shards
from offload.partition.unit import Slot, Unit

EXPORT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH_FILE = "pytorch_model.bin"


@dataclass(frozen=True)
class Stored:
    """A weight that lies in the store."""

    unit: Unit
    slot: Slot


Held = Callable[[], torch.Tensor]  # a tensor in memory, of the type that is written


@dataclass(frozen=True)
class Exportable:
    """All tensors of a model and where they are, by the names that files give them."""

    sources: Mapping[str, tuple[TensorEntry, Stored | Held]]
    stream: WeightStream
    notes: ModelNotes
    dtype: torch.dtype  # of the weights as they are written; some may stay fp32
    check: Callable[[], None]  # raises where what was read may have changed meanwhile

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry, _ in self.sources.values())


def export_safetensors(
    model: Exportable, folder: Path, *, max_shard_bytes: int, progress: bool = False
) -> list[Path]:
    """Write shards, index and configuration to `folder`; return the files.

    Tied weights are written once.  Raises StoreError, with nothing left, where the folder holds
    another model or has too little room.
    """
    _prepare(folder, (SINGLE, INDEX, "model-*.safetensors"))
    shards = split_shards([entry for entry, _ in model.sources.values()], max_shard_bytes)
    names = shard_names(len(shards))
    metadata = {"format": "pt"} | model.notes.aliases
    written: list[Path] = []
    with contextlib.ExitStack() as undo, _bar(model, progress) as bar:
        undo.callback(_remove, written)
        pieces = _stored_pieces(model, [entry for shard in shards for entry in shard])
        for name, shard in zip(names, shards, strict=True):
            header = encode_header(shard, metadata)
            num_bytes = len(header) + sum(entry.num_bytes for entry in shard)
            with FileStream(folder / name, num_bytes, model.stream.queue) as file:
                file.write(header)
                for entry in shard:
                    for piece in _pieces(model, entry, pieces):
                        file.write(_bytes(piece))
                        bar.update(piece.nbytes)
            written.append(file.path)
        model.check()
        texts = dict(model.notes.files_for(model.dtype))
        if len(shards) > 1:
            texts[INDEX] = _index(names, shards)  # last: with it the export exists
        for name, text in texts.items():
            write_small(folder / name, text, model.stream.queue)
            written.append(folder / name)
        undo.pop_all()
    return written


def export_torch_file(model: Exportable, folder: Path, *, progress: bool = False) -> Path:
    """Write one `pytorch_model.bin`: a plain state dict, tied weights under all of their names.

    The weights pass through an unlinked file in `folder`, so the disk must hold them twice.
    """
    _prepare(folder, (TORCH_FILE,))
    entries = [entry for entry, _ in model.sources.values()]
    _check_room(folder, 2 * model.num_bytes)
    backing = BackingFile(folder)
    state: dict[str, torch.Tensor] = {}
    partial = folder / f"{TORCH_FILE}.partial"
    with contextlib.closing(backing), _bar(model, progress) as bar:
        pieces = _stored_pieces(model, entries)
        for entry in entries:
            flat = backing.empty(entry.num_elems, entry.dtype)
            start = 0
            for piece in _pieces(model, entry, pieces):
                flat[start : start + len(piece)] = piece
                start += len(piece)
                bar.update(piece.nbytes)
            state[entry.name] = flat.view(entry.shape)
        model.check()
        state |= {name: state[kept] for name, kept in model.notes.aliases.items()}
        try:
            torch.save(state, partial)
            _flush(partial)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            partial.unlink(missing_ok=True)
            raise StoreError(
                f"{folder / TORCH_FILE}: cannot be written: {str(error).splitlines()[0]}."
                " Free space or use another path."
            ) from error
    return partial.rename(folder / TORCH_FILE)


def shard_names(count: int) -> list[str]:
    """Names as `from_pretrained` knows them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"export: expected dtype bf16, fp16 or fp32, got {dtype}.")
    return dtype


def _prepare(folder: Path, patterns: Sequence[str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be made: {error.strerror}.") from error
    found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if found:
        raise StoreError(
            f"{folder}: expected no model there, got {found[0]}. Remove it, or use another folder."
        )
    remove_partial(folder)


def _check_room(folder: Path, num_bytes: int) -> None:
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < num_bytes:
        raise StoreError(
            f"{folder}: expected {num_bytes:,} free bytes, for the file and for the weights on"
            f" their way to it, got {free:,}. Free space or use another path."
        )


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _bar(model: Exportable, progress: bool) -> tqdm:
    """Bytes, rate and time left, on a terminal."""
    return tqdm(
        total=model.num_bytes, unit="B", unit_scale=True, desc="export",
        disable=None if progress else True,
    )  # fmt: skip


def _stored_pieces(model: Exportable, entries: Sequence[TensorEntry]) -> Iterator[torch.Tensor]:
    """Pieces of everything that lies in the store, in the order of `entries`."""
    sources = [model.sources[entry.name] for entry in entries]
    return model.stream.pieces(
        [(item.unit, item.slot, entry.dtype) for entry, item in sources if isinstance(item, Stored)]
    )


def _pieces(
    model: Exportable, entry: TensorEntry, stored: Iterator[torch.Tensor]
) -> Iterator[torch.Tensor]:
    source = model.sources[entry.name][1]
    if isinstance(source, Stored):
        return islice(stored, -(-entry.num_elems // PIECE_ELEMS))
    tensor = source().detach().contiguous().view(-1)
    assert tensor.dtype is entry.dtype, entry
    return iter([tensor] if len(tensor) else [])


def _bytes(piece: torch.Tensor) -> memoryview:
    return memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _index(names: Sequence[str], shards: Sequence[Sequence[TensorEntry]]) -> str:
    entries = [entry for shard in shards for entry in shard]
    totals = {
        "total_size": sum(entry.num_bytes for entry in entries),
        "total_parameters": sum(entry.num_elems for entry in entries),
    }
    places = {
        entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard
    }
    return json.dumps({"metadata": totals, "weight_map": places}, indent=2, sort_keys=True) + "\n"
