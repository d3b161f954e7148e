"""What a store must remember of its model, beside the tensors, so that an export needs no model.

tied       a further name of a weight -> the name under which it is stored
renamed    name in the store -> name in exported files, where loading wants another of its names
buffers    names of the persistent ones
files      config.json, and generation_config.json where there is one
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModelNotes:
    """Facts about a model, as values that JSON and `torch.load(weights_only=True)` know."""

    tied: Mapping[str, str] = field(default_factory=dict, hash=False)
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)
    buffers: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, hash=False)  # name -> JSON text

    @classmethod
    def of(cls, model: nn.Module) -> ModelNotes:
        tied = _tied(model)
        # Hugging Face models say which names loading ties to another one: files keep the other.
        dependent = getattr(model, "all_tied_weights_keys", None)
        if dependent is None:
            dependent = getattr(model, "_tied_weights_keys", None)
        renamed = _renamed(tied, dependent or ())
        return cls(tied, renamed, tuple(_persistent_buffers(model)), _config_files(model))

    @classmethod
    def decode(cls, saved: Mapping[str, Any]) -> ModelNotes:
        return cls(saved["tied"], saved["renamed"], tuple(saved["buffers"]), saved["files"])

    def encode(self) -> dict[str, Any]:
        return {
            "tied": dict(self.tied), "renamed": dict(self.renamed), "buffers": list(self.buffers),
            "files": dict(self.files),
        }  # fmt: skip

    @property
    def aliases(self) -> dict[str, str]:
        """Name that exported files leave out -> the name of the same weight that they have."""
        names = {name: self.renamed.get(stored, stored) for name, stored in self.tied.items()}
        names |= self.renamed
        return {name: kept for name, kept in names.items() if name != kept}

    def files_for(self, dtype: torch.dtype) -> dict[str, str]:
        """The files, with `dtype` as the type that `from_pretrained` takes by itself."""
        files = dict(self.files)
        if "config.json" in files:
            config = json.loads(files["config.json"])
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config[key] = str(dtype).removeprefix("torch.")
            files["config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
        return files


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """Every name of each parameter, under the first, by which the engine knows it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0]: found for found in names.values()}


def _tied(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter, and the first."""
    return {
        name: first for first, names in all_names(model).items() for name in names if name != first
    }


def _renamed(tied: Mapping[str, str], dependent: Iterable[str]) -> dict[str, str]:
    names: dict[str, list[str]] = {}
    for name, stored in tied.items():
        names.setdefault(stored, [stored]).append(name)
    left_out = set(dependent)
    kept = {
        stored: next((name for name in group if name not in left_out), stored)
        for stored, group in names.items()
    }
    return {stored: name for stored, name in kept.items() if name != stored}


def _persistent_buffers(model: nn.Module) -> Iterator[str]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{path}.{name}" if path else name


def _config_files(model: nn.Module) -> dict[str, str]:
    """The configurations of a Hugging Face model; nothing for others."""
    files: dict[str, str] = {}
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_json_string", None)):
        values = json.loads(config.to_json_string(use_diff=True))
        values["architectures"] = [type(model).__name__]
        files["config.json"] = json.dumps(values)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        files["generation_config.json"] = generation.to_json_string()
    return files
