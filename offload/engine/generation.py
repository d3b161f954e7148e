"""What belongs to a generation beside the tensors in the store (DESIGN D1).

    at the end of step():    step counts, param_groups, buffers, RNG, tracked objects
    at the next engine call: learning-rate schedulers, which step after step(), and param_groups

Encoded with torch.save and read with weights_only: no code runs when a store is opened.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from offload.errors import StateError


class Stateful(Protocol):
    """Anything that can be tracked."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def capture_rng() -> dict[str, Any]:
    """The state of every generator that training code commonly uses."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            gauss,
        ],
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # else nobody has drawn there
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Undo what happened since `capture_rng`."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        for index, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, index)  # there may be fewer devices than there were


def capture_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hyper-parameters of `param_groups`, without the parameters."""
    hidden = ("params", "param_names")
    return [{key: value for key, value in group.items() if key not in hidden} for group in groups]


def check_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raise StateError unless the number of groups is the same."""
    if len(groups) != len(saved):
        raise StateError(
            f"resume: expected {len(saved)} parameter groups as in the store, got {len(groups)}."
            " Build the engine with the same groups."
        )


def restore_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Put saved hyper-parameters back; raises StateError when the number of groups differs."""
    check_groups(groups, saved)
    for group, values in zip(groups, saved, strict=True):
        group.update(values)


class Tracked:
    """Objects whose state belongs to a generation, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._saved: dict[str, Any] = {}  # resumed states of objects not yet tracked

    def add(self, name: str, item: Stateful) -> bool:
        """Track `item`; load its state if the resumed generation has one.  True: it was loaded."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                raise StateError(
                    f"track: expected an object with {method}() under {name!r}, got {type(item)}."
                )
        self._objects[name] = item
        if name not in self._saved:
            return False
        item.load_state_dict(self._saved.pop(name))
        return True

    def find(self, name: str) -> Stateful | None:
        """The object under `name`, if it is tracked."""
        return self._objects.get(name)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load states into the tracked objects now, into others when they are tracked."""
        self._saved = {}
        for name, state in saved.items():
            if name in self._objects:
                self._objects[name].load_state_dict(state)
            else:
                self._saved[name] = state

    def capture(self, *, late: bool = False) -> dict[str, Any]:
        """Copies of the states of all objects, or of those that step after step() (`late`)."""
        return {
            name: copy.deepcopy(item.state_dict())
            for name, item in self._objects.items()
            if isinstance(item, LRScheduler) or not late
        }


def capture_late(tracked: Tracked, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What steps after step(): schedulers, and the learning rates that they set."""
    return {"tracked": tracked.capture(late=True), "groups": capture_groups(groups)}


def is_same(one: Any, other: Any) -> bool:
    """Compare two states."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def with_late(state: Mapping[str, Any], late: Mapping[str, Any]) -> dict[str, Any]:
    """Complete what was captured when step() returned by what was captured later."""
    return {**state, **late, "tracked": {**state["tracked"], **late["tracked"]}}


def encode(state: Mapping[str, Any]) -> bytes:
    """Bytes of a payload."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def decode(payload: bytes) -> dict[str, Any]:
    """The payload again; only plain values and tensors are accepted."""
    found: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    return found
