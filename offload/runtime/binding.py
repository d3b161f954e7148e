"""A unit bound to live parameters: one flat device storage, made by a fill, dropped by an eviction.

    present   parameters are views of flat    [ trainable 0 | pad | trainable 1 | ... | frozen ]
    evicted   parameters wear the guard class over one NaN, expanded to their shape

A unit that stays on the device keeps its storage while evicted, and needs no fill while that is
fresh: until a step or an edit makes it old.

A storage is never freed under a view: whoever still holds one (a recomputed segment, the user)
keeps that memory alive, and code that reads below torch's overrides finds NaN, not a crash.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
from collections.abc import Callable, Mapping

import torch
from torch import nn

from offload.partition.unit import Slot, Unit
from offload.runtime.evicted import EvictedParameter
from offload.runtime.streams import Event


class Presence(enum.Enum):
    """Where the weights of a unit are, as far as the device knows."""

    EVICTED = "storage freed, or put aside by a unit that stays; parameters wear the guard class"
    FILLING = "storage allocated, contents undefined; only the fetch in progress may touch it"
    PRESENT = "storage filled; parameters are plain and readable"


class BoundUnit:
    """Parameters of one unit, views of one storage while present.  Presence changes in `_move`."""

    def __init__(
        self, unit: Unit, parameters: Mapping[str, nn.Parameter], *,
        dtype: torch.dtype, device: torch.device, stays: bool = False,
    ) -> None:  # fmt: skip
        """Bind nothing yet: call `hold` or `evict`.  `stays`: the storage is kept for good."""
        self.unit = unit
        self.stays = stays
        self.fresh = False  # the kept storage holds the current weights
        self.parameters = [parameters[slot.tensor.name] for slot in unit.slots]
        self.dtype = dtype
        self.presence = Presence.PRESENT
        self.holds = 0  # how many keep it present whatever forward and backward do
        self._classes = [type(parameter) for parameter in self.parameters]
        self._flat: torch.Tensor | None = None
        self.vacant: Event | None = None  # behind it compute no longer uses the storage's memory
        self._hole = torch.full((), float("nan"), dtype=dtype, device=device)
        self._versions: list[int] = []  # of the parameters, when their values were the unit's

    @property
    def weight_bytes(self) -> int:
        return self.unit.num_elems * self.dtype.itemsize

    @property
    def flat(self) -> torch.Tensor:
        """All weights, (num_elems,); while filling or present."""
        assert self._flat is not None, self.unit.name
        return self._flat

    @property
    def is_away(self) -> bool:
        """True when its next use needs a fill."""
        return self.presence is Presence.EVICTED and not self.fresh

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """True when `storage` is the one under the present weights."""
        return self._flat is not None and self._flat.untyped_storage()._cdata == storage._cdata

    @property
    def storage_id(self) -> int:
        """Identity of the present storage."""
        return int(self.flat.untyped_storage()._cdata)

    def view(self, slot: Slot) -> torch.Tensor:
        """The weights of one tensor, in its shape."""
        return self.flat[slot.start : slot.stop].view(slot.tensor.shape)

    def hold(self) -> None:
        """Make the parameters views of a storage with their own values, for good."""
        self._flat = new_storage(self.unit.num_elems, self.dtype, self._hole.device)
        with torch.no_grad():
            for slot, parameter in zip(self.unit.slots, self.parameters, strict=True):
                view = self.view(slot)
                view.copy_(parameter.data)
                parameter.data = view
        accept_edits(self)

    def reserve(self, mark: Callable[[], Event | None]) -> None:
        """Allocate the storage of the next fill, unless it is there; `mark()`: a point behind all
        that compute was given so far.
        """
        if self._flat is None:
            self._flat = new_storage(self.unit.num_elems, self.dtype, self._hole.device)
            self.vacant = mark()

    def give_up(self) -> None:
        """Free a storage that was made ahead and is not filled."""
        if self.presence is Presence.EVICTED and not self.stays:
            self._flat = None

    def begin_fill(self, mark: Callable[[], Event | None]) -> None:
        """EVICTED -> FILLING: allocate the storage, unless that was done ahead."""
        self._move(Presence.EVICTED, Presence.FILLING)
        self.reserve(mark)

    def end_fill(self) -> None:
        """FILLING -> PRESENT: parameters become plain views."""
        self._move(Presence.FILLING, Presence.PRESENT)
        self.fresh = self.stays
        places = zip(self.unit.slots, self.parameters, self._classes, strict=True)
        for slot, parameter, plain in places:
            parameter.__class__ = plain
            parameter.data = self.view(slot)
        accept_edits(self)

    def evict(
        self, guard: type[EvictedParameter], mark: Callable[[], Event | None]
    ) -> None:  # fmt: skip
        """PRESENT or FILLING -> EVICTED: drop the storage, dress the parameters in `guard`.

        Of a unit that stays the storage is put aside: compute has used it up to `mark()`.
        """
        if self.presence is Presence.FILLING or not self.fresh:
            self._flat, self.fresh = None, False
        self.vacant = mark() if self._flat is not None else None
        if self.presence is Presence.PRESENT:
            for slot, parameter in zip(self.unit.slots, self.parameters, strict=True):
                hole = self._hole.expand(slot.tensor.shape)
                _empty(parameter, hole, frozen=not parameter.requires_grad)
                parameter.__class__ = guard
        self.presence = Presence.EVICTED

    def outdate(self) -> None:
        """The weights have changed elsewhere: once evicted, it is filled again before its use."""
        self.fresh = False

    def _move(self, expected: Presence, to: Presence) -> None:
        assert self.presence is expected, (self.unit.name, self.presence, to)
        self.presence = to


def accept_edits(bound: BoundUnit) -> None:
    """What present parameters hold now is the unit's."""
    bound._versions = [parameter._version for parameter in bound.parameters]


def edited(bound: BoundUnit) -> str | None:
    """The name of a present parameter that was changed in place since, as far as torch tells:
    it counts no edits of `p.data`."""
    places = zip(bound.unit.slots, bound.parameters, bound._versions, strict=True)
    return next((s.tensor.name for s, p, before in places if p._version != before), None)


def let_go(bound: BoundUnit) -> None:
    """Of an evicted unit: its parameters are plain, without their data, for whoever binds them."""
    assert bound.presence is Presence.EVICTED, bound.unit.name
    for parameter, plain in zip(bound.parameters, bound._classes, strict=True):
        parameter.__class__ = plain


def _empty(parameter: nn.Parameter, hole: torch.Tensor, *, frozen: bool) -> None:
    """Put `hole` in place of a parameter's data.

    A recomputed segment saves a frozen parameter itself, and may still need it when all gradients
    of its unit are complete: the graph keeps what it saved, the parameter gets another tensor.
    """
    if frozen and parameter._use_count() > 1:  # type: ignore[attr-defined]
        torch._C._swap_tensor_impl(parameter, nn.Parameter(hole, requires_grad=False))
    else:
        parameter.data = hole


def new_storage(num_elems: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed (num_elems,) tensor; on a CPU in a mapping of its own.

    From the heap, units that come and go would leave holes which activations then pin: memory would
    grow with the number of units.  Huge pages make the first touch cheap.
    """
    num_bytes = num_elems * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(num_elems, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
