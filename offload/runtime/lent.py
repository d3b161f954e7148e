"""Gradients as a user meets them: `p.grad` between backward and step().

    kept  --p.grad-->  lent: a HOST copy, unscaled  --edited-->    kept, when the step or the next
                                                                   backward comes
                                                    --unchanged--> nothing happens
    p.grad = tensor    lent likewise          p.grad = None    the gradient is forgotten
    zero_grad(set_to_none=False)              zero, unless the next backward gives more

What is lent stays in host memory beside the budgets until the step has ended: reading the gradient
of every parameter, as `clip_grad_norm_` does, takes as much as they are large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from offload.errors import StateError
from offload.runtime.binding import BoundUnit
from offload.runtime.gradients import GradientKeeper


class LentGradients:
    """Owns what was lent.  Called by the user's thread, and by hooks when a gradient comes."""

    def __init__(
        self, keeper: GradientKeeper, bound: Sequence[BoundUnit], *,
        scale: Callable[[], float | None],
    ) -> None:  # fmt: skip
        """`bound`: all units.  `scale()`: the factor that is in what is kept, with fp16."""
        self.keeper = keeper
        self._bound = bound
        self._scale = scale  # None: without a loss scale
        self._where = {
            slot.tensor.name: (unit.unit.index, slot) for unit in bound for slot in unit.unit.slots
        }
        self._lent: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)  # by unit
        self._zeros: dict[int, set[str]] = defaultdict(set)  # by unit
        self._stepped: set[str] = set()  # with a gradient in steps since zero_grad()

    def read(self, name: str) -> torch.Tensor | None:
        """What `p.grad` is: the same tensor until the step; edits of it are honoured."""
        unit = self._where[name][0]
        if name not in self._lent[unit]:
            found = self._unscaled(name)
            if found is not None:
                self._lent[unit][name] = found
        return self._lent[unit].get(name)

    def copy_of(self, name: str) -> torch.Tensor | None:
        """A HOST copy of the gradient as it is now, unscaled; None: there is none."""
        lent = self._lent[self._where[name][0]].get(name)
        return self._unscaled(name) if lent is None else lent.detach().cpu().clone()

    def assign(self, name: str, value: torch.Tensor | None) -> None:
        """Do what `p.grad = value` does; raises StateError for a tensor that does not fit."""
        unit, slot = self._where[name]
        if value is None:
            self._lent[unit].pop(name, None)
            self._zeros[unit].discard(name)
            self.keeper.forget(unit, name)
            return
        if value.shape != slot.tensor.shape or not value.is_floating_point() or value.is_sparse:
            raise StateError(
                f"gradient of {name!r}: expected a dense float tensor of shape"
                f" {tuple(slot.tensor.shape)}, got {value.dtype} of {tuple(value.shape)}."
            )
        if not slot.tensor.trainable:
            raise StateError(
                f"gradient of {name!r}: expected a parameter that is trained, got a frozen one."
            )
        self._lent[unit][name] = value

    def take_back(self, unit: int, *, stays: bool = False) -> None:
        """Keep what was edited; more gradients of the unit are about to come.

        `stays`: what is lent remains so, and later edits of it are honoured too.
        """
        edited = {}
        for name, tensor in self._lent[unit].items():
            flat = self._as_kept(unit, tensor)
            if self._same(name, flat, tensor):
                continue
            if bool(flat.any()):
                edited[name] = flat
            else:  # costs nothing if more comes, and widens no 16-bit gradient
                self._zeros[unit].add(name)
                self.keeper.forget(unit, name)
        if not stays:
            self._lent[unit].clear()
        self.keeper.replace(unit, edited)
        self._zeros[unit] -= edited.keys()

    def take_all_back(self, *, stays: bool = False) -> None:
        """Keep what was edited or assigned, and the zeros; a step is about to read it.

        `stays` as for `take_back`.
        """
        for bound in self._bound:
            index = bound.unit.index
            self.take_back(index, stays=stays)
            self.keeper.take(bound)  # assigned where it was a plain parameter
            kept = self.keeper[index]
            zeros = self._zeros.pop(index, set()) - kept.has_grad
            sizes = {name: self._where[name][1].tensor.num_elems for name in zeros}
            self.keeper.replace(
                index, {name: torch.zeros(size, dtype=kept.dtype) for name, size in sizes.items()}
            )

    def clear(self, *, zeros: bool = False) -> None:
        """Forget this step's gradients; `zeros`: those that there were are zero from now on."""
        self.end_step()
        names, self._stepped = self._stepped, set()
        for name in names if zeros else ():
            self._zeros[self._where[name][0]].add(name)

    def end_step(self) -> None:
        """The step has read the gradients."""
        for bound in self._bound:
            self._stepped |= self._names(bound.unit.index)
        self._zeros.clear()
        self._lent.clear()
        self.keeper.clear()

    @property
    def has_gradients(self) -> bool:
        """True when some parameter has a gradient."""
        return self.keeper.has_gradients or any(map(bool, (*self._lent.values(),)))

    def _names(self, unit: int) -> set[str]:
        return self.keeper[unit].has_grad | self._zeros[unit] | self._lent[unit].keys()

    def _unscaled(self, name: str) -> torch.Tensor | None:
        unit, slot = self._where[name]
        if name in self.keeper[unit].has_grad:
            found = self.keeper.read(unit, slot).view(slot.tensor.shape)
        elif name in self._zeros[unit]:
            found = torch.zeros(slot.tensor.shape, dtype=self.keeper[unit].dtype)
        else:
            return None
        scale = self._scale()
        return found if scale is None else found.float() / scale

    def _as_kept(self, unit: int, tensor: torch.Tensor) -> torch.Tensor:
        """In the form of what is kept: (n,) HOST, scaled."""
        flat = tensor.detach().cpu().contiguous().view(-1)
        scale = self._scale()
        if scale is not None:
            flat = flat.float() * scale
        return flat.to(self.keeper[unit].dtype)

    def _same(self, name: str, flat: torch.Tensor, lent: torch.Tensor) -> bool:
        """True where `lent`, `flat` in the form of what is kept, is what is kept."""
        unit, slot = self._where[name]
        if name not in self.keeper[unit].has_grad:
            return False
        if _same_bits(self.keeper.read(unit, slot), flat):
            return True
        # A scale that is no power of two rounds, so that scaling does not undo unscaling.
        fresh = self._unscaled(name)
        return fresh is not None and _same_bits(fresh.view(-1), lent.detach().cpu().flatten())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype:
        return False
    bits = torch.int16 if one.dtype.itemsize == 2 else torch.int32
    return torch.equal(one.view(bits), other.view(bits))
