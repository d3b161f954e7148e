"""Units as JSON: what a store is compared with when it is opened, and read by without its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from offload.errors import StoreCorrupt
from offload.partition.states import StateTable
from offload.partition.unit import Slot, TensorSpec, Unit, lay_out
from offload.partition.weights import Weights

_OWN = ("name", "shape", "trainable", "fp32")  # what a tensor is, wherever it lies
_STATE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


def describe_units(units: Iterable[Unit], states: StateTable) -> dict[str, Any]:
    """The part of a layout that tells where everything lies; `units_of` reads it."""
    return {
        "state_dtype": _STATE_DTYPES[states.dtype],
        "states": list(states.names),
        **({"whole": True} if states.whole else {}),
        "units": [
            {"name": unit.name, "tensors": [_tensor(slot, states) for slot in unit.slots]}
            for unit in units
        ],
    }


def _tensor(slot: Slot, states: StateTable) -> dict[str, Any]:
    tensor = slot.tensor
    told: dict[str, Any] = {
        "name": tensor.name, "shape": list(tensor.shape), "trainable": tensor.trainable,
        "start": slot.start,
    }  # fmt: skip
    if tensor.fp32:
        told["fp32"] = True
    if states.whole:
        return {**told, "state_elems": tensor.state_elems}
    return {**told, "plain": tensor.plain} if states.packs else told


def units_of(layout: Mapping[str, Any]) -> list[Unit]:
    """The units as the engine laid them out; raises StoreCorrupt where they contradict that."""
    names = {name: short for short, name in _STATE_DTYPES.items()}
    states = StateTable.of(layout.get("states", StateTable().names), names[layout["state_dtype"]])
    weights = Weights(layout["dtype"])
    states = replace(states, whole=layout.get("whole", False), weights=weights)
    units = []
    for index, value in enumerate(layout["units"]):
        tensors = [
            TensorSpec(
                tensor["name"], tuple(tensor["shape"]), tensor["trainable"],
                tensor.get("plain", False), tensor.get("state_elems", 0), tensor.get("fp32", False),
            )
            for tensor in value["tensors"]
        ]  # fmt: skip
        unit = lay_out(value["name"], index, tensors, states=states)
        starts = {slot.tensor.name: slot.start for slot in unit.slots}
        if any(starts[tensor["name"]] != tensor["start"] for tensor in value["tensors"]):
            raise StoreCorrupt(f"unit {unit.name!r}: its tensors do not lie where the layout says.")
        units.append(unit)
    return units


def tensors_of(layout: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Tensors by name, without what depends on the units and on the format of state."""
    return {
        tensor["name"]: {key: tensor[key] for key in _OWN if key in tensor}
        for unit in layout["units"]
        for tensor in unit["tensors"]
    }
