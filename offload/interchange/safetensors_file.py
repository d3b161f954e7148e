"""The safetensors format: headers read, checked and made.

    | 8: length of the header | JSON, padded with spaces to a multiple of 4096 | tensor | tensor ...
                                {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {...}}

Offsets count from the end of the header; there are no holes.  Reading maps the file: a tensor is a
view of it, and takes none of the process's own memory.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError, StoreCorrupt
from offload.partition.unit import round_up
from offload.runtime.source import FilePlace

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGN_BYTES = 4096  # of the data's start, so that it can be read by direct I/O
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elems(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elems * self.dtype.itemsize


# --- reading


class SafetensorsFile:
    """An open file, checked; its tensors stay valid after it is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header, self._data_start = _read_header(file, num_bytes, path)
            self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
            self._places = {
                name: _check_entry(name, value, num_bytes - self._data_start, path)
                for name, value in header.items()
            }
            self._map = _map(file.fileno(), num_bytes)
        self._map.madvise(mmap.MADV_SEQUENTIAL)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    @property
    def entries(self) -> dict[str, TensorEntry]:
        return {name: entry for name, (entry, _) in self._places.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, in its shape, as a view of the file; writing changes a copy of the page."""
        entry, offset = self._places[name]
        if not entry.num_elems:
            return torch.empty(entry.shape, dtype=entry.dtype)
        start = self._data_start + offset
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.num_bytes, offset=start)
        if flat.data_ptr() % entry.dtype.itemsize:
            flat = flat.clone()  # torch and the kernels want elements aligned
        return flat.view(entry.dtype).view(entry.shape)

    def place(self, tensor: torch.Tensor) -> FilePlace | None:
        """Where the file holds what `tensor` views; None: its memory is not the file's."""
        start = tensor.data_ptr() - self._address
        inside = 0 <= start <= len(self._map) - tensor.nbytes
        return (
            FilePlace(self.path, start, len(self._map))
            if inside and tensor.is_contiguous()
            else None
        )


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    """Private, so that nothing can change the file; without a claim on memory for copies."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13
    return mmap.mmap(fd, num_bytes, mmap.MAP_PRIVATE | no_reserve, mmap.PROT_READ | mmap.PROT_WRITE)


def _read_header(file: Any, num_bytes: int, path: Path) -> tuple[dict[str, Any], int]:
    prefix = file.read(_LENGTH.size)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
    if not 2 <= length <= min(_MAX_HEADER_BYTES, num_bytes - _LENGTH.size):
        raise StoreCorrupt(
            f"{path}: expected a safetensors file, got a header of {length} bytes in a file of"
            f" {num_bytes}. It is cut, or of another format."
        )
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise StoreCorrupt(f"{path}: its header is not JSON: {error}.") from error
    if not isinstance(header, dict):
        raise StoreCorrupt(f"{path}: expected a JSON object as header, got {type(header)}.")
    return header, _LENGTH.size + length


def _check_entry(
    name: str, value: Any, data_bytes: int, path: Path
) -> tuple[TensorEntry, int]:  # fmt: skip
    """The entry and its offset, or an error that names the tensor."""
    where = f"{path}: tensor {name!r}"
    try:
        shape, code = tuple(int(size) for size in value["shape"]), value["dtype"]
        start, stop = (int(offset) for offset in value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(f"{where}: its entry is malformed: {error!r}.") from error
    if code not in DTYPES:
        raise ConfigError(f"{where}: expected one of {', '.join(DTYPES)}, got {code}.")
    entry = TensorEntry(name, shape, DTYPES[code])
    if min(shape, default=0) < 0 or stop - start != entry.num_bytes or start < 0:
        raise StoreCorrupt(
            f"{where}: expected {entry.num_bytes} bytes for shape {list(shape)}, got"
            f" offsets {start} to {stop}."
        )
    if stop > data_bytes:
        raise StoreCorrupt(
            f"{where}: expected {stop} bytes of data, got {data_bytes}. The file is cut."
        )
    return entry, start


# --- writing


def split_shards(entries: Sequence[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """Distribute tensors over files of at most `max_bytes` of data, in order; one that is larger
    gets a file of its own."""
    shards: list[list[TensorEntry]] = [[]]
    used = 0
    for entry in entries:
        if shards[-1] and used + entry.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.num_bytes
    # Wide elements first: every tensor is then aligned to its own element size.
    return [sorted(shard, key=lambda entry: -entry.dtype.itemsize) for shard in shards]


def encode_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Length, JSON and padding; the data of `entries` follows, in order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        stop = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, stop]
        }  # fmt: skip
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = round_up(_LENGTH.size + len(text), _ALIGN_BYTES) - _LENGTH.size
    return _LENGTH.pack(padded) + text.ljust(padded)
