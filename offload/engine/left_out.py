"""What of a model is not offloaded, and why: lines for `describe` and for the plan."""

from __future__ import annotations

from collections.abc import Iterator

from offload.engine.blueprint import Blueprint


def left_out(blueprint: Blueprint) -> tuple[str, ...]:
    """A line for each kind of thing that does not travel, and for each parameter left alone."""
    return tuple(_lines(blueprint))


def _lines(blueprint: Blueprint) -> Iterator[str]:
    yield from blueprint.found.left_alone
    small = blueprint.found.persistent
    if small is not None:
        names = [slot.tensor.name for slot in small.slots]
        least = blueprint.config.param_persistence_threshold
        yield (
            f"{len(names)} small tensors ({small.num_tensor_elems:,} elements, such as {names[0]}):"
            f" on the device, their state in host memory: below param_persistence_threshold,"
            f" {least:,} elements"
        )
    buffers = dict(blueprint.model.named_buffers())
    if buffers:
        size = sum(buffer.nbytes for buffer in buffers.values())
        yield (
            f"{len(buffers)} buffers ({size:,} bytes, such as {next(iter(buffers))}): on the"
            " device: buffers keep their type and value"
        )
    frozen = [
        slot.tensor
        for unit in blueprint.found.units
        for slot in unit.slots
        if not slot.tensor.trainable
    ]
    if frozen:
        elems = sum(tensor.num_elems for tensor in frozen)
        yield (
            f"{len(frozen)} frozen tensors ({elems:,} elements, such as {frozen[0].name}): their"
            " weights travel and are never written back; requires_grad is False: they have no state"
        )
