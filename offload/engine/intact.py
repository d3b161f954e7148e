"""The model is still the one that was taken over: nothing in it would be trained in vain.

a parameter that the engine does not know     added, replaced or resized afterwards
requires_grad turned on after the forward     no state was reserved, nobody took the gradient
a small tensor in another storage             model.to(), half(), share_memory() ...
a present parameter changed in place          outside gathered(): the masters would not know
"""

from __future__ import annotations

from torch import nn

from offload.engine.connect import Parts
from offload.errors import StateError
from offload.runtime.binding import accept_edits, edited
from offload.runtime.evicted import gradient_of


def check_intact(model: nn.Module, parts: Parts) -> None:
    """Raise StateError, naming the parameter, where `model` was changed behind the engine."""
    names = parts.names_by_id
    trainable = {
        slot.tensor.name
        for unit in parts.ground.blueprint.units
        for slot in unit.slots
        if slot.tensor.trainable
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in names:
            raise StateError(
                f"parameter {name!r}: expected one that the engine took over, got another, of"
                f" shape {tuple(parameter.shape)}: its module was added, replaced or resized, and"
                " it would never be trained. Change the model before making the engine; now:"
                " export(folder), load the model from it, change it, make a new engine."
            )
        if names[id(parameter)] not in trainable and gradient_of(parameter) is not None:
            raise StateError(
                f"parameter {name!r}: expected it thawed before the model's forward, got a gradient"
                " of one that was frozen then. Turn requires_grad on between steps, and call the"
                " whole model."
            )
    _check_in_place(parts)
    _check_unedited(parts)


def _check_unedited(parts: Parts) -> None:
    if parts.editor.is_open:
        return
    small = parts.ground.persistent
    for bound in [*parts.residency.present.values(), *([small.bound] if small else [])]:
        name = edited(bound)
        if name is None:
            continue
        if small is not None and bound is small.bound:
            small.refresh(parts.ground.device)
            accept_edits(bound)
        else:
            bound.outdate()
            parts.residency.evict(bound.unit.index)
        raise StateError(
            f"parameter {name!r}: expected edits inside `with engine.gathered(parameter):`, got one"
            " outside, which the fp32 masters do not know. It is undone: edit inside such a block."
        )


def _check_in_place(parts: Parts) -> None:
    if parts.ground.persistent is None:
        return
    bound = parts.ground.persistent.bound
    for slot, parameter in zip(bound.unit.slots, bound.parameters, strict=True):
        if parameter.numel() and not bound.owns(parameter.untyped_storage()):
            raise StateError(
                f"parameter {slot.tensor.name!r}: expected it where the engine put it, got other"
                f" memory, in {parameter.dtype} on {parameter.device}: the model was moved or"
                " converted with to(), half() or the like. Set device, dtype and compute_dtype of"
                " the engine instead."
            )
