"""A small layout whose sizes can be counted by hand: blocks of 8,192 weights, two small tensors."""

from __future__ import annotations

from offload.partition.states import StateTable
from offload.partition.unit import TensorSpec, Unit, lay_out
from offload.schedule.placement import Formats, place
from offload.schedule.traffic import Layout

ELEMS = 8192
FORMATS = Formats(weight=2, compute=2, grad=2)


def units_of(count: int, states: StateTable | None = None) -> list[Unit]:
    states = states or StateTable()
    return [
        lay_out(f"blocks.{i}", i, [TensorSpec(f"w{i}", (64, 128))], states=states)
        for i in range(count)
    ]


def small_of(index: int, states: StateTable | None = None) -> Unit:
    specs = [TensorSpec("norm", (64,)), TensorSpec("fixed", (64,), trainable=False)]
    return lay_out("persistent", index, specs, states=states or StateTable())


def layout_of(count: int = 3, *, formats: Formats = FORMATS, capacity: int = 1 << 20) -> Layout:
    """Everything on disk, in chunks of one unit."""
    units, small = units_of(count, formats.states), small_of(count, formats.states)
    placement = place(units, small, formats, host_memory=1 << 24, chunk_elems=ELEMS)
    return Layout(units, small, placement, formats, capacity)
