"""torch's own hooks, on the modules whose forward needs a unit, on the root, and on every
parameter.

    root pre-forward   begin the pass (passes.py), push saved-tensor hooks
      module pre-forward   use(units)
      module post-forward  watch its outputs for backward; release(units)
    root post-forward  pop; evict what is left
    outputs' gradient  (backward reaches a module)  ensure(units)
    parameter's gradient accumulated                unit complete? its gradients leave, evict
    end of backward                                 take the rest, evict everything

Correctness never depends on a guess: whatever backward needs comes back through the saved-tensor
hooks. Everything is removed by `close()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from offload.errors import StateError
from offload.runtime.binding import BoundUnit
from offload.runtime.completion import Arrivals
from offload.runtime.gradients import GradientKeeper, drop_graphs
from offload.runtime.horizon import Phase
from offload.runtime.layer_major import LayerMajor
from offload.runtime.passes import Followed, Passes, generates, whole_models
from offload.runtime.residency import Residency
from offload.runtime.saved import SavedViews


class BackwardListener(Protocol):
    """Who may begin a unit's update during backward."""

    def begin_backward(self) -> None:
        """The last backward of a step begins."""

    def begin(self, unit: int) -> None:
        """Backward has reached the unit."""

    def release(self, unit: int) -> None:
        """The unit's gradients are kept."""


class Hooks:
    """Installs and removes all hooks of one engine; runs on the user's and autograd's threads."""

    def __init__(
        self, model: nn.Module, needs: Sequence[tuple[nn.Module, tuple[int, ...]]],
        residency: Residency, keeper: GradientKeeper, *,
        persistent: BoundUnit | None, before_forward: Callable[[], Hooks],
        listener: BackwardListener,
    ) -> None:  # fmt: skip
        """`before_forward()` returns who goes on with the forward: these hooks, or others that
        have replaced them."""
        self._layers: LayerMajor | None = None  # of a step in layer-major order
        self._residency = residency
        self._keeper = keeper
        self._persistent = persistent
        self._before_forward = before_forward
        self._listener = listener
        self.last_micro_step = True  # of the backward that comes next
        self._views = SavedViews(residency.present, self._bring_back)
        self._passes = Passes()
        self._arrived = [Arrivals(bound) for bound in residency.bound]
        self.live = self  # who answers to these hooks while a forward runs that has replaced them
        self._handles: list[Any] = []
        self._install(model, needs)

    def close(self) -> None:
        """Remove every hook; may be called twice."""
        while self._handles:
            self._handles.pop().remove()

    def _install(
        self, model: nn.Module, needs: Sequence[tuple[nn.Module, tuple[int, ...]]]
    ) -> None:  # fmt: skip
        keep = self._handles.append
        # The root's pre-hook must run before that of a unit whose module is the root.
        for module, units in needs:
            enter, leave = _Eager(self, Hooks._enter, units), _Eager(self, Hooks._leave, units)
            keep(module.register_forward_pre_hook(enter, prepend=True))
            keep(module.register_forward_hook(leave, always_call=True))
        for whole in whole_models(model):
            keep(whole.register_forward_pre_hook(_Eager(self, Hooks._enter_root), prepend=True))
            keep(whole.register_forward_hook(_Eager(self, Hooks._leave_root), always_call=True))
            if generates(whole):
                keep(Followed(whole, partial(_generating, self)))
        for index, bound in enumerate(self._residency.bound):
            for position, slot in enumerate(bound.unit.slots):
                if slot.tensor.trainable:
                    hook = partial(self._accumulated, index, position)
                    keep(_when_accumulated(bound.parameters[position], hook))

    # --- forward

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        outermost = self._passes.enter()
        if not outermost or self._layers or _inside_backward():  # recomputation of the root
            return
        grad = torch.is_grad_enabled()
        phase, goes_on = self._passes.next(grad=grad)
        if not goes_on:
            _begin(self, phase)
        live = self.live
        if live is not self:
            live._passes.enter()
        if grad:
            live._residency.by_layers = False
            live._views.push()

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._passes.leave() or self._layers or _inside_backward():
            return
        self._views.pop()
        _end(self)
        _watch(output, self._begin_backward)

    def _enter(self, units: tuple[int, ...], module: nn.Module, args: Any) -> None:
        again = _inside_backward()
        if self._layers and not again:
            self._layers.enter(units)
        for index in units:
            self._arrived[index].calls += not again
            self._residency.use(index)
        if self._layers and again:
            self._layers.begin_again(module, args)
        elif self._layers:
            self._layers.begin(units, module, args)

    def _leave(self, units: tuple[int, ...], module: nn.Module, args: Any, output: Any) -> None:
        _watch(output, partial(self._backward_reaches, units))
        for index in units:
            self._residency.release(index)

    # --- backward

    def _begin_backward(self) -> None:
        """Enter BACKWARD once a pass; what is left over is taken when autograd has finished."""
        if self._residency.phase is Phase.IDLE and _inside_backward():
            self._residency.begin(Phase.BACKWARD)
            if self.last_micro_step:
                self._listener.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _bring_back(self, index: int) -> None:
        self._begin_backward()
        self._residency.ensure(index)

    def _backward_reaches(self, units: tuple[int, ...]) -> None:
        self._begin_backward()
        for index in units:
            self._residency.ensure(index)
            # Behind the copy of its weights, which can run while this waits.
            self._keeper.make_room()
            self._listener.begin(index)

    def _accumulated(self, index: int, position: int, parameter: torch.Tensor) -> None:
        self._begin_backward()
        if self._layers is not None:
            self._layers.refuse(self._residency.bound[index], position)
        if self._arrived[index].add(position):
            self._complete(index)

    def _complete(self, index: int) -> None:
        bound = self._residency.bound[index]
        self._keeper.take(bound, then=partial(self._listener.release, index))
        # What is frozen in it may still be needed: it leaves for the next unit, or at the end.
        if all(parameter.requires_grad for parameter in bound.parameters):
            self._residency.evict(index)

    def forward_by_layers(
        self, model: nn.Module, calls: Sequence[Callable[[], torch.Tensor]], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run the forwards of a step's micro-batches unit by unit; `calls` return their losses."""
        self.abort()
        live = self._before_forward()
        if live is not self:
            return live.forward_by_layers(model, calls, seeds)
        _forget_calls(self._arrived)
        self._residency.begin(Phase.FORWARD)
        self._residency.by_layers = True
        self._layers = LayerMajor(
            model, self._residency, self._persistent, seeds=seeds, take=self._keeper.take,
            done=self._complete,
        )  # fmt: skip
        losses = self._layers.forward(calls, self._views.packing)
        self._residency.begin(Phase.IDLE)
        self._residency.forget_uses()
        self._residency.evict_unused(but=self._residency.kept_for_backward())
        self._layers.let_go()
        self._residency.look_ahead(Phase.BACKWARD)
        _watch(losses, self._begin_backward)
        return losses

    def _end_backward(self) -> None:
        if self._layers is not None:
            self._layers.finish()
            self._layers = None
        for index, arrived in enumerate(self._arrived):
            if arrived.finish():
                self._complete(index)
        if self._persistent is not None:
            self._keeper.take(self._persistent)
        self._residency.evict_unused()
        self._residency.begin(Phase.IDLE)

    def abort(self) -> None:
        """Go on after an exception: what backward had produced stays, as in torch."""
        self._passes.reset()
        for bound in (*self._residency.bound, *([self._persistent] if self._persistent else ())):
            drop_graphs(bound)
        self._views.pop()
        self._residency.forget_uses()
        self._end_backward()


def recover(hooks: Hooks) -> None:
    """Abort a pass that has ended in an exception, if there is one."""
    if hooks._residency.phase is not Phase.IDLE and not _inside_backward():
        hooks.abort()


def _begin(hooks: Hooks, phase: Phase) -> None:
    """Begin a pass of a whole model, whatever the last one left."""
    recover(hooks)
    hooks.live = live = hooks._before_forward()
    _forget_calls(live._arrived)
    live._residency.begin(phase)


def _forget_calls(arrived: Sequence[Arrivals]) -> None:
    for each in arrived:
        each.calls = 0


def watch(hooks: Hooks, parameters: Collection[int]) -> None:
    """Take the gradients of these, by identity: an eviction may have lost a frozen one's hook."""
    for index, bound in enumerate(hooks._residency.bound):
        for position, parameter in enumerate(bound.parameters):
            if id(parameter) in parameters and not parameter._post_accumulate_grad_hooks:
                hook = partial(hooks._accumulated, index, position)
                hooks._handles.append(_when_accumulated(parameter, hook))


def _when_accumulated(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register `hook`, of one that is frozen now too: it stays when that changes."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(not frozen)
    return handle


def _end(hooks: Hooks) -> None:
    """End a pass: what backward uses first stays and is fetched."""
    residency = hooks._residency
    training = residency.phase is Phase.FORWARD
    residency.begin(Phase.IDLE)
    residency.forget_uses()
    residency.evict_unused(but=residency.kept_for_backward() if training else ())
    if training:
        residency.look_ahead(Phase.BACKWARD)


@contextlib.contextmanager
def _generating(hooks: Hooks) -> Iterator[None]:
    """A model's `generate` runs; inside another forward it is part of that."""
    if hooks._passes.inside or hooks._layers or _inside_backward():
        yield
        return
    _begin(hooks, Phase.PROMPT)
    hooks = hooks.live
    hooks._passes.begin_generate()
    try:
        yield
    finally:
        hooks._passes.end_generate()
        if hooks._residency.phase in (Phase.PROMPT, Phase.TOKEN):
            _end(hooks)


def _watch(output: Any, action: Callable[[], None]) -> None:
    """Run `action` when backward reaches one of the tensors in `output`."""
    for item in tree_iter(output):
        if isinstance(item, torch.Tensor) and item.requires_grad and item.grad_fn:
            item.register_hook(lambda grad: action())
        elif dataclasses.is_dataclass(item):
            _watch(list(vars(item).values()), action)


class _Eager:
    """A hook that torch.compile calls and does not look into; it stays with its module."""

    def __init__(self, hooks: Hooks, hook: Callable[..., None], *args: Any) -> None:
        """Call `hook(hooks.live, *args, ...)`."""
        self._hooks = hooks
        self._hook = hook
        self._args = args
        self._call: Callable[..., None] = torch.compiler.disable(self._run)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def _run(self, *args: Any) -> None:
        self._hook(self._hooks.live, *self._args, *args)

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise StateError(
            "copying or pickling of a model that an engine holds: its weights live in the store."
            " Save or copy engine.module.state_dict() instead, or use engine.export(...)."
        )


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def is_hooked(model: nn.Module) -> bool:
    """True when an open engine holds this model."""
    return any(isinstance(hook, _Eager) for hook in model._forward_pre_hooks.values())
