"""`model.load_state_dict` on a model whose weights live in the store.

    begins   what is not in use is evicted; evicted parameters note what is copied into them
    ends     unit by unit: gather, copy, write back what changed as a new generation

Small tensors are on the device, where torch copies into them; writing them back makes it last.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from offload.engine.connect import Parts, catch_up
from offload.errors import StateError
from offload.runtime.guard import ParameterGuard
from offload.runtime.hooks import recover


class StateDictLoading:
    """The hooks of one engine's model."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self._parts = parts
        for handle in (
            model.register_load_state_dict_pre_hook(self._begin),
            model.register_load_state_dict_post_hook(self._end),
        ):
            parts.ground.closing.callback(handle.remove)

    def _begin(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:  # fmt: skip
        if metadata.get("assign_to_params_buffers"):
            raise StateError(
                "load_state_dict: expected assign=False with a model that an engine holds, got"
                " True, which replaces its parameters. Leave it out."
            )
        if self._parts.ground.store.read_only:
            raise StateError(
                "load_state_dict: expected an engine that may train, got one opened with"
                " read_only=True. Load into the model before making the engine."
            )
        # Only what is evicted is noted, and what is gathered is written when its block ends.
        recover(self._parts.hooks)
        catch_up(self._parts.ground)
        self._parts.residency.evict_unused()
        guard = self._parts.guard
        guard.loading = {}
        with contextlib.suppress(TypeError):  # a plain dict: the model is part of a larger one
            # load_state_dict's own copy, which goes when it ends, in an exception too.
            weakref.finalize(state, _stop_loading, weakref.ref(guard), guard.loading).atexit = False

    def _end(self, module: nn.Module, keys: Any) -> None:
        loaded, self._parts.guard.loading = self._parts.guard.loading or {}, None
        found = self._parts.ground.blueprint.found.parameters
        by_unit: dict[int, list[str]] = defaultdict(list)
        for name in found:
            by_unit[self._parts.reader.find(name)[0].index].append(name)
        small = self._parts.ground.blueprint.found.persistent
        for unit, names in by_unit.items():
            if (small is None or unit != small.index) and not loaded.keys() & set(names):
                continue
            with self._parts.editor.gathered(names), torch.no_grad():
                for name in names:
                    if name in loaded:
                        found[name].copy_(loaded[name])


def _stop_loading(guard: weakref.ref[ParameterGuard], loading: dict[str, torch.Tensor]) -> None:
    """Refuse copies into evicted parameters again, unless another load has begun."""
    found = guard()
    if found is not None and found.loading is loading:
        found.loading = None
