"""All micro-batches of a step through one unit before the next: weights move once a step.

    horizontal    F1.0 F2.0 F3.0  B3.0 B2.0 B1.0   F1.1 F2.1 F3.1  B3.1 B2.1 B1.1
    layer-major   F1.0 F1.1  F2.0 F2.1  F3.0 F3.1  B3.*  B2.*  B1.*

Each micro-batch's forward runs in a thread of its own; a baton passes where a module that needs a
unit begins.  One backward of all losses runs layer-major by itself, since autograd orders nodes by
sequence numbers, which count per thread and meet with the baton.  Each micro-batch has leaves of
its own over the same storage, so that its gradients leave separately, and are added in the order of
the micro-batches: the same bits as one after another.  All graphs are alive; checkpoint the units.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from offload.errors import StateError
from offload.runtime.baton import Baton, Stopped
from offload.runtime.binding import BoundUnit, Presence
from offload.runtime.completion import Arrivals
from offload.runtime.evicted import set_gradient
from offload.runtime.residency import Residency


class Leaves:
    """For each micro-batch a leaf over each trainable parameter, put into the modules in turn."""

    def __init__(self, model: nn.Module, bound: Sequence[BoundUnit], count: int) -> None:
        self._holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append((module._parameters, name))
        self._of = [
            {id(unit): [_leaf(parameter) for parameter in unit.parameters] for unit in bound}
            for _ in range(count)
        ]

    def of(self, index: int, unit: BoundUnit) -> list[nn.Parameter | None]:
        """The leaves of micro-batch `index`, None for what is frozen."""
        return self._of[index][id(unit)]

    def put(self, index: int, unit: BoundUnit) -> None:
        """Make the model use those of micro-batch `index` for a present unit."""
        for parameter, leaf in zip(unit.parameters, self.of(index, unit), strict=True):
            if leaf is not None:
                leaf.data = parameter.data
                for table, name in self._holders[id(parameter)]:
                    table[name] = leaf

    def take_out(self, unit: BoundUnit) -> None:
        """Put the unit's own parameters back, and let go of its storage."""
        for position, parameter in enumerate(unit.parameters):
            for table, name in self._holders[id(parameter)]:
                table[name] = parameter
            for leaves in self._of:
                leaf = leaves[id(unit)][position]
                if leaf is not None:
                    # On its own device: backward holds what is made now against it.
                    hole = torch.empty((), dtype=leaf.dtype, device=leaf.device)
                    leaf.data = hole.expand(parameter.shape)


def _leaf(parameter: nn.Parameter) -> nn.Parameter | None:
    if not parameter.requires_grad:
        return None
    hole = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    return nn.Parameter(hole)


class LayerMajor:
    """The forward of all micro-batches of one step, and what its backward needs."""

    def __init__(
        self, model: nn.Module, residency: Residency, persistent: BoundUnit | None, *,
        seeds: Sequence[int], take: Callable[[BoundUnit], None], done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`take(unit)`: one micro-batch's gradients are in the parameters; `done(unit)`: the last
        ones were.
        """
        self._residency = residency
        self._persistent = persistent
        self._take = take
        self._done = done
        self._baton = Baton(seeds)
        self._numbers = range(len(seeds))
        units = [*residency.bound, *([persistent] if persistent else [])]
        self._leaves = Leaves(model, units, len(seeds))
        self._arrivals = [UnitArrivals(unit, len(seeds)) for unit in residency.bound]
        self._owner: dict[tuple[int, int], int] = {}  # of a module's call, by its first input
        self._held: set[int] = set()  # units that stay until all micro-batches are through
        self._here = threading.local()
        for bound in residency.bound:
            self._watch(bound)

    # --- forward, on the threads of the micro-batches

    def forward(
        self, calls: Sequence[Callable[[], torch.Tensor]], saving: Callable[[], Any]
    ) -> list[torch.Tensor]:
        """Run the micro-batches' forwards together; raises the first error.

        `saving()`: the saved-tensor hooks of one thread.  A call does to its loss all that is done
        before backward: nodes of another thread would put one micro-batch behind the other.
        """
        losses: list[Any] = [None for _ in calls]
        errors: list[BaseException] = []
        as_here = _settings_of_this_thread()

        def work(index: int) -> None:
            self._here.index = index
            try:
                self._baton.take(index)
                self._put_present(index)
                with torch.enable_grad(), as_here(), saving():
                    losses[index] = calls[index]()
                self._baton.leave(index)
            except Stopped:
                pass
            except BaseException as error:
                errors.append(error)
                self._baton.stop()

        threads = [threading.Thread(target=work, args=(index,)) for index in self._numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._release({*self._held})
        if errors:
            self.finish()
            raise errors[0]
        return losses

    def enter(self, units: tuple[int, ...]) -> None:
        """A module that needs `units` begins in a forward: let the others come to here first."""
        index = self._here.index
        self._baton.pass_on(index)
        if index == self._baton.leader:
            self._release(self._held - {*units})
        for unit in units:
            if unit not in self._held:
                self._residency.use(unit)
                self._held.add(unit)

    def begin(self, units: tuple[int, ...], module: nn.Module, args: Any) -> None:
        """Its units are present: use the leaves of the micro-batch that runs."""
        index = self._here.index
        for unit in units:
            self._arrivals[unit].calls[index] += 1
        self._owner[_call_of(module, args)] = index
        self._put_present(index)

    def begin_again(self, module: nn.Module, args: Any) -> None:
        """The same for a checkpointed module that runs again in backward."""
        index = self._owner.get(_call_of(module, args))
        if index is None:
            raise StateError(
                f"layer-major order: expected {type(module).__name__} to be recomputed with the"
                " inputs that it had in forward, got others: its micro-batch is not known."
                ' Use train_batch(..., order="horizontal").'
            )
        self._put_present(index)

    def _put_present(self, index: int) -> None:
        """Whatever the model reads now belongs to this micro-batch, or is on disk."""
        for bound in self._residency.bound:
            if bound.presence is Presence.PRESENT:
                self._leaves.put(index, bound)
        if self._persistent is not None:
            self._leaves.put(index, self._persistent)

    def _release(self, units: set[int]) -> None:
        self._held -= units
        for unit in units:
            self._residency.release(unit)
        self.let_go()

    def refuse(self, bound: BoundUnit, position: int) -> None:
        """A parameter itself got a gradient, so some micro-batch used no leaf of its own."""
        set_gradient(bound.parameters[position], None)
        raise StateError(
            f"layer-major order: expected {bound.unit.slots[position].tensor.name!r} to be used in"
            " its module's forward, got a use elsewhere, whose gradients cannot be told apart."
            ' Use train_batch(..., order="horizontal").'
        )

    def let_go(self) -> None:
        """Hold no storage of units that have left the device."""
        for bound in self._residency.bound:
            if bound.presence is Presence.EVICTED:
                self._leaves.take_out(bound)

    # --- backward

    def _watch(self, bound: BoundUnit) -> None:
        arrivals = self._arrivals[bound.unit.index]

        def hook(index: int, position: int) -> Callable[[torch.Tensor], None]:
            def arrived(leaf: torch.Tensor) -> None:
                if arrivals.add(index, position):
                    self._hand_over(bound)
                    self._done(bound.unit.index)
                    self._leaves.take_out(bound)

            return arrived

        for index in self._numbers:
            for position, leaf in enumerate(self._leaves.of(index, bound)):
                if leaf is not None:
                    leaf.register_post_accumulate_grad_hook(hook(index, position))

    def _hand_over(self, bound: BoundUnit) -> None:
        """Give the gradients on, one micro-batch after the other."""
        for index in self._numbers:
            leaves = self._leaves.of(index, bound)
            for parameter, leaf in zip(bound.parameters, leaves, strict=True):
                if leaf is not None and leaf.grad is not None:
                    set_gradient(parameter, leaf.grad)
                    leaf.grad = None
            self._take(bound)

    def finish(self) -> None:
        """The end of backward: hand over what is left, and leave the model as it was."""
        for bound, arrivals in zip(self._residency.bound, self._arrivals, strict=True):
            if arrivals.finish():
                self._hand_over(bound)
                self._done(bound.unit.index)
            self._leaves.take_out(bound)
        if self._persistent is not None:
            self._hand_over(self._persistent)
            self._leaves.take_out(self._persistent)


class UnitArrivals:
    """When the gradients of all micro-batches of a unit are there."""

    def __init__(self, bound: BoundUnit, count: int) -> None:
        self.calls = [0] * count  # of the unit's modules in the forward of each micro-batch
        self._arrivals = [Arrivals(bound) for _ in range(count)]
        self._whole: set[int] = set()

    def add(self, index: int, position: int) -> bool:
        """Count a gradient of micro-batch `index`; True: nothing more is expected of any."""
        arrivals = self._arrivals[index]
        arrivals.calls = self.calls[index]
        if arrivals.add(position):
            self._whole.add(index)
            return len(self._whole) == len(self._arrivals)
        return False

    def finish(self) -> bool:
        """End the pass; True: something arrived and is not handed over yet, or came late."""
        for arrivals, calls in zip(self._arrivals, self.calls, strict=True):
            arrivals.calls = calls
        return any([arrivals.finish() for arrivals in self._arrivals])


def _call_of(module: nn.Module, args: Any) -> tuple[int, int]:
    """Names a call of a module; inputs are alive until it is recomputed, so addresses differ."""
    for value in tree_iter(args):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return id(module), value.data_ptr()
    return id(module), 0


def _settings_of_this_thread() -> Callable[[], Any]:
    """Make contexts in which another thread casts as this one does now, and gives work to the same
    device and stream: each of these is a thread's own.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}

    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            for kind, dtype in dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    return settings
