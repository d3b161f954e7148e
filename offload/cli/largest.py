"""The largest model that this machine trains with given settings: a generic decoder, by bisection.

    host      the least slots and the small tensors' state         <= host budget
    device    the largest unit at work and one prefetch            <= device memory
    disk      all sides, and gradients that the host cannot hold   <= free space

Activations are not counted: they depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.engine.blueprint import Blueprint, alive_steps
from offload.errors import BudgetError
from offload.partition.unit import Unit
from offload.schedule.device import device_least_bytes
from offload.schedule.generic import WIDTH_MULTIPLE, DecoderShape
from offload.schedule.placement import grad_bytes, place
from offload.store.extents import UnitExtents, lay_out_file

MOST_STEPS = 700  # of width: nine million million parameters


@dataclass(frozen=True)
class Limits:
    """Bytes that a model may take."""

    host: int
    device: int
    disk: int


@dataclass(frozen=True)
class Largest:
    """The largest shape that fits, and what keeps the next one out."""

    shape: DecoderShape | None  # None: not even the smallest one
    limit: str  # "host", "device", "disk" or "the shapes tried"


def largest(blueprint: Blueprint, limits: Limits) -> Largest:
    """Search with the types, states and durability of `blueprint`."""
    return _search(lambda shape: obstacle(blueprint, shape, limits))


def _search(obstacle_of: Callable[[DecoderShape], str | None]) -> Largest:
    shape = _shape(1)
    limit = obstacle_of(shape)
    if limit is not None:
        return Largest(None, limit)
    fits, too_large, limit = 1, MOST_STEPS, obstacle_of(_shape(MOST_STEPS))
    if limit is None:
        return Largest(_shape(MOST_STEPS), "the shapes tried")
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        found = obstacle_of(_shape(middle))
        if found is None:
            fits = middle
        else:
            too_large, limit = middle, found
    return Largest(_shape(fits), limit)


def _shape(steps: int) -> DecoderShape:
    return DecoderShape.of_width(steps * WIDTH_MULTIPLE)


def obstacle(blueprint: Blueprint, shape: DecoderShape, limits: Limits) -> str | None:
    """What `shape` has too little of, in the order of the sums above; None: it fits."""
    formats, config = blueprint.formats, blueprint.config
    units, small = shape.units(blueprint.states, config.param_persistence_threshold)
    try:
        found = place(units, small, formats, host_memory=limits.host)
    except BudgetError:
        return "host"
    if device_least_bytes(units, small, formats, alive=alive_steps(config)) > limits.device:
        return "device"
    sides = 1 if config.durability == "none" else 2
    spilled = sum(grad_bytes(unit, formats) for unit in units if unit.index in found.spilled)
    if sides * sum(map(_file_bytes, [*units, small])) + spilled > limits.disk:
        return "disk"
    return None


def _file_bytes(unit: Unit) -> int:
    return lay_out_file(UnitExtents.of(unit), 0, path=0).file_bytes
