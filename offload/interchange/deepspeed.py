"""Read a DeepSpeed ZeRO-3 checkpoint: masters, moments and step counts by parameter.

    <dir>/latest                                            the tag
    <dir>/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt   names, shapes, frozen tensors, buffers
    <dir>/<tag>/*zero_pp_rank_<r>_mp_rank_00_optim_states.pt  flat fp32 masters and moments

    rank 0   | a 0:k | b 0:m | c ... |      each parameter is cut into equal shares, one per rank,
    rank 1   | a k:  | b m:  | c ... |      the last one padded; shares lie in the order of the
                                            shapes, in one flat tensor per group of parameters

Files are mapped, and nothing in them is executed: classes that are not plain values become empty
stand-ins.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError, StoreCorrupt, StoreError
from offload.partition.unit import Role

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt$")
_MOMENTS = {Role.EXP_AVG: "exp_avg", Role.EXP_AVG_SQ: "exp_avg_sq"}


@dataclass(frozen=True)
class Shares:
    """One tensor, divided over the ranks."""

    parts: Sequence[torch.Tensor]  # per rank, (num_each,), mapped
    num_elems: int

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n)."""
        num_each, done = len(self.parts[0]), 0
        while done < len(out):
            rank, offset = divmod(start + done, num_each)
            piece = self.parts[rank][offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)


@dataclass(frozen=True)
class _Place:
    """Where a parameter's shares lie, the same in every rank."""

    shape: tuple[int, ...]
    group: int
    start: int  # in the group's flat tensor
    num_each: int


@dataclass(frozen=True)
class ZeroCheckpoint:
    """An open checkpoint.  Names are those of the model, the first of a tied weight's."""

    folder: Path
    global_steps: int
    buffers: Mapping[str, torch.Tensor] = field(repr=False)
    _places: Mapping[str, _Place] = field(repr=False)
    _frozen: Mapping[str, tuple[tuple[int, ...], Shares]] = field(repr=False)
    _shared: Mapping[str, str] = field(repr=False)
    _states: Sequence[Mapping[str, Any]] = field(repr=False)  # per rank

    @classmethod
    def open(cls, directory: Path, tag: str | None = None) -> ZeroCheckpoint:
        """Open `directory/tag` (None: the latest).

        Raises StoreError where there is none, ConfigError for another stage or kind of it.
        """
        folder = _folder(directory, tag)
        models, optims = _files(folder, "model"), _files(folder, "optim")
        if len(models) != len(optims):
            raise StoreError(
                f"{folder}: expected model and optimizer states of every rank, got"
                f" {len(models)} and {len(optims)} files. Copy all of them."
            )
        model = [_load(path) for path in models]
        states = [_optimizer_state(path) for path in optims]
        first = model[0]
        names = set(first.get("buffer_names") or ())
        return cls(
            folder, int(first.get("global_steps", 0)),
            {name: value for name, value in first["module"].items() if name in names},
            _place(first["param_shapes"], states, folder), _frozen(model),
            first.get("shared_params") or {}, states,
        )  # fmt: skip

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, under every name."""
        found = {name: place.shape for name, place in self._places.items()}
        found |= {name: shape for name, (shape, _) in self._frozen.items()}
        return found | {n: found[kept] for n, kept in self._shared.items() if kept in found}

    def step_count(self, name: str) -> int:
        """Updates that a parameter has had; 0 for a frozen one."""
        place = self._places.get(self._shared.get(name, name))
        state = self._moments(0, place.group) if place is not None else {}
        return int(state.get("step", 0))

    def master(self, name: str) -> Shares:
        """The fp32 master, or the value of a frozen parameter."""
        name = self._shared.get(name, name)
        if name in self._frozen:
            return self._frozen[name][1]
        place = self._places[name]
        return _cut(place, [state["fp32_flat_groups"][place.group] for state in self._states])

    def moment(self, name: str, role: Role) -> Shares | None:
        """A moment; None where there is none: it is zero."""
        place = self._places.get(self._shared.get(name, name))
        if place is None or not self._moments(0, place.group):
            return None
        ranks = range(len(self._states))
        return _cut(place, [self._moments(rank, place.group)[_MOMENTS[role]] for rank in ranks])

    def _moments(self, rank: int, group: int) -> Mapping[str, Any]:
        state = self._states[rank]["optimizer_state_dict"]["state"]
        found: Mapping[str, Any] = state.get(group, {})
        return found


def _folder(directory: Path, tag: str | None) -> Path:
    if tag is None and (directory / "latest").is_file():
        tag = (directory / "latest").read_text().strip()
    folder = directory / tag if tag else directory
    if not folder.is_dir():
        raise StoreError(f"{folder}: expected a DeepSpeed checkpoint there, got no folder.")
    return folder


def _files(folder: Path, kind: str) -> list[Path]:
    """The files of one kind in the order of their ranks, none missing."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = _RANK.search(path.name)
        if match is None or match[3] != kind:
            continue
        if int(match[2]):
            raise ConfigError(f"{path}: expected no model parallelism, got mp_rank {match[2]}.")
        found[int(match[1])] = path
    if not found or sorted(found) != list(range(len(found))):
        raise StoreError(
            f"{folder}: expected zero_pp_rank_<r>_mp_rank_00_{kind}_states.pt of all ranks, got"
            f" ranks {sorted(found)}. Only checkpoints of ZeRO stage 3 can be read."
        )
    return [found[rank] for rank in range(len(found))]


class _StandIn:
    """What an object of an unknown class becomes."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _load(path: Path) -> dict[str, Any]:
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        classes: list[Any] = [(type("StandIn", (_StandIn,), {}), name) for name in unknown]
        with torch.serialization.safe_globals(classes):
            found = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise StoreCorrupt(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
    except pickle.UnpicklingError as error:
        raise StoreCorrupt(
            f"{path}: expected tensors and plain values, got something that runs code to be read."
            " It is not read."
        ) from error
    if not isinstance(found, dict):
        raise StoreCorrupt(f"{path}: expected a dictionary, got {type(found).__name__}.")
    return found


def _optimizer_state(path: Path) -> Mapping[str, Any]:
    state: Mapping[str, Any] = _load(path).get("optimizer_state_dict") or {}
    groups = state.get("fp32_flat_groups")
    if not groups or any(not isinstance(group, torch.Tensor) for group in groups):
        raise ConfigError(
            f"{path}: expected flat fp32 groups of ZeRO stage 3, got {', '.join(map(str, state))}."
            " Other stages, and optimizer states that were offloaded to NVMe, cannot be read."
        )
    return state


def _place(
    shapes: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, _Place]:
    """Walk the shapes along the flat groups; the sums must come out even."""
    sizes = [len(group) for group in states[0]["fp32_flat_groups"]]
    ends = list(accumulate(sizes))
    places: dict[str, _Place] = {}
    offset = group = 0
    for name, size in (item for part in shapes for item in part.items()):
        shape = tuple(int(length) for length in size)
        num_each = -(-torch.Size(shape).numel() // len(states))
        while group < len(ends) and offset >= ends[group]:
            group += 1
        if group == len(ends) or offset + num_each > ends[group]:
            raise StoreCorrupt(
                f"{folder}: parameter {name!r} of shape {list(shape)} does not lie in the flat"
                f" groups of {sizes} elements where it should. It is of an unknown version."
            )
        places[name] = _Place(shape, group, offset - (ends[group] - sizes[group]), num_each)
        offset += num_each
    if offset != ends[-1]:
        raise StoreCorrupt(
            f"{folder}: expected {offset} elements in the flat groups of a rank, got {ends[-1]}."
        )
    return places


def _frozen(
    ranks: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[tuple[int, ...], Shares]]:
    found = {}
    for name, size in (ranks[0].get("frozen_param_shapes") or {}).items():
        parts = [rank["frozen_param_fragments"][name] for rank in ranks]
        shape = tuple(int(length) for length in size)
        found[name] = (shape, Shares(parts, torch.Size(shape).numel()))
    return found


def _cut(place: _Place, flats: Sequence[torch.Tensor]) -> Shares:
    stop = place.start + place.num_each
    parts = [flat[place.start : stop] for flat in flats]
    return Shares(parts, torch.Size(place.shape).numel())
