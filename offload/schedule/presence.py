"""The most that the device holds of a model at once: part of its budget, and less than all of it.

    forward    a unit while it is in use, and the one with which forward turns around
    backward   a unit's weights and its gradients, beside those of the unit before it: backward
               reaches a unit when the last gradients of the one behind it are about to be complete
    tied       parts of the gradients of weights that several modules have (device.py)

Beside a GPU the next unit's weights come in, and gradients of the last ones go out, meanwhile.
Persistent tensors stay, with their gradients, and so does what is placed there.  In layer-major
order each micro-step's gradients of a unit are there until the last ones are.  Activations are not
counted.
"""

from __future__ import annotations

from offload.schedule.device import gradient_bytes
from offload.schedule.traffic import Layout, Uses


def device_peak_bytes(layout: Layout, uses: Uses) -> int:
    """Bytes of weights and gradients, in the types that compute."""
    size, alive = layout.formats.compute_of, uses.micro_steps if uses.by_layers else 1
    weights = {unit.index: unit.num_elems * size(unit) for unit in layout.units}
    found = gradient_bytes(layout.all_units, layout.formats, alive=alive)
    small = layout.persistent
    fixed = small.num_elems * size(small) + found[small.index][0] if small else 0
    fixed += sum(weights[index] for index in layout.placement.kept)
    fixed += layout.placement.on_device_bytes
    weights.update(dict.fromkeys(layout.placement.kept, 0))  # counted, whether in use or not
    forward = max((weights[index] for index in uses.forward), default=0)
    backward = max((weights[index] + sum(found[index]) for index in uses.backward), default=0)
    if layout.formats.landing:
        moving = sorted(weights.values())[-2:]
        largest = max([*moving, 0])
        ahead = min(sum(moving), max(layout.weight_capacity, largest)) - largest
        forward, backward = forward + ahead, backward + ahead + layout.leaving
    return fixed + max(forward, backward)
