"""Connect the parts of an engine after the decisions are made (assembly.py).

store <- ledger <- fetcher <- residency <- hooks -> keeper -> stepper -> pipeline -> store
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import aio
from offload.assembly import (
    Blueprint,
    HostMemory,
    divide,
    initial_flags,
    kernel_threads,
    open_store,
)
from offload.editor import Editor
from offload.ledger import Ledger
from offload.metrics import Metrics
from offload.optim.adamw import AdamRule, StepCounts
from offload.optim.pipeline import UpdatePipeline
from offload.partition.unit import Role, Unit
from offload.reader import Reader, snapshot
from offload.runtime.binding import BoundUnit
from offload.runtime.device import Device, make_device
from offload.runtime.evicted import guard_class
from offload.runtime.fetch import Fetcher
from offload.runtime.gradients import GradFormat, GradientKeeper, KeptUnit
from offload.runtime.guard import ParameterGuard
from offload.runtime.hooks import Hooks
from offload.runtime.initial import InitialWriter
from offload.runtime.persistent import PersistentState
from offload.runtime.residency import Residency
from offload.schedule.placement import grad_bytes
from offload.step import Stepper, StepRules
from offload.store.format import UnitFlag
from offload.store.store import Store

READ_DEPTH = WRITE_DEPTH = 8


@dataclass(frozen=True)
class Parts:
    """Everything an engine is made of; closed through `closing`, in reverse order of construction."""

    blueprint: Blueprint
    store: Store
    metrics: Metrics
    ledger: Ledger
    keeper: GradientKeeper
    residency: Residency
    guard: ParameterGuard
    hooks: Hooks
    stepper: Stepper
    counts: StepCounts
    reader: Reader
    editor: Editor
    names_by_id: dict[int, str]  # parameters
    persistent: PersistentState | None
    device: Device
    queue: aio.Queue
    memory: HostMemory
    resumed: bool
    closing: contextlib.ExitStack


@dataclass(frozen=True)
class Captures:
    """How the engine's own state is captured for a commit."""

    state: Callable[[], dict[str, Any]]
    late: Callable[[], dict[str, Any]]  # what steps after step()


def connect(blueprint: Blueprint, captures: Captures) -> Parts:
    """Allocate, open, write or resume, bind.  Unmakes everything if it fails."""
    with contextlib.ExitStack() as closing:
        store, resumed = open_store(blueprint)
        closing.callback(store.close)
        if not resumed:
            closing.push(_remove_on_error(store))
        parts = _connect(blueprint, store, resumed, captures, closing)
        parts.closing.push(closing.pop_all())
        return parts


def _remove_on_error(store: Store) -> Callable[..., bool]:
    def leave(kind: object, error: object, trace: object) -> bool:
        if kind is not None:
            store.remove()
        return False

    return leave


def _connect(
    blueprint: Blueprint, store: Store, resumed: bool, captures: Captures,
    closing: contextlib.ExitStack,
) -> Parts:  # fmt: skip
    config, placement = blueprint.config, blueprint.placement
    metrics = Metrics()
    queue = aio.Queue(config.aio_backend, read_depth=READ_DEPTH, write_depth=WRITE_DEPTH)
    closing.callback(queue.close)
    memory = divide(blueprint)
    closing.callback(memory.slab.close)
    queue.register(memory.slab.buffer)
    threads = kernel_threads(blueprint)
    if threads is not None:
        closing.callback(threads.close)
    device = make_device(blueprint.device, threads)
    units = {unit.index: unit for unit in blueprint.units}
    ledger = Ledger(store, units, metrics, capture_late=captures.late)
    bound, persistent = _bind(blueprint, memory)
    _load(blueprint, ledger, queue, memory, persistent, resumed)
    if persistent is not None:
        persistent.bound.bind(copy=True)
        persistent.refresh(device, exact=blueprint.exact)
    guard = ParameterGuard(bound)
    guard_type = guard_class(guard)
    fetcher = Fetcher(
        queue, memory.fetch, ledger, device,
        chunk_elems=placement.chunk_elems, exact=blueprint.exact, metrics=metrics,
    )  # fmt: skip
    closing.callback(fetcher.discard)
    for unit in bound:  # their values are in the store now; this frees the model's own memory
        unit.bind(copy=False)
        unit.evict(guard_type)
    residency = Residency(
        bound, fetcher, guard_type, weight_bytes=blueprint.weight_capacity, metrics=metrics
    )
    guard.residency = residency
    keeper = _keeper(blueprint, store, queue, device, memory, persistent, ledger, metrics)
    closing.callback(keeper.close)
    hooks = Hooks(
        blueprint.model, blueprint.found.hooks, residency, keeper,
        persistent=persistent.bound if persistent else None, before_forward=ledger.engine_called,
    )  # fmt: skip
    closing.callback(hooks.close)
    pipeline = UpdatePipeline(
        queue, memory.update.view, num_slots=placement.update_slots,
        chunk_elems=placement.chunk_elems, grad_elem_bytes=blueprint.formats.grad,
        num_threads=blueprint.num_threads,
    )  # fmt: skip
    closing.callback(pipeline.close)
    counts = StepCounts(AdamRule.of(config.optimizer))
    stepper = Stepper(
        blueprint.found.units, persistent, names=list(blueprint.found.parameters),
        rules=StepRules(placement.chunk_elems, config.gradient_clipping), ledger=ledger,
        keeper=keeper, pipeline=pipeline, counts=counts, metrics=metrics,
    )  # fmt: skip
    reader = Reader(queue, ledger, units, persistent)
    editor = Editor(
        residency, ledger, reader, queue, persistent,
        chunk_elems=placement.chunk_elems, exact=blueprint.exact, capture=captures.state,
    )  # fmt: skip
    names = {id(parameter): name for name, parameter in blueprint.found.parameters.items()}
    return Parts(
        blueprint, store, metrics, ledger, keeper, residency, guard, hooks, stepper, counts, reader,
        editor, names, persistent, device, queue, memory, resumed, contextlib.ExitStack(),
    )  # fmt: skip


def _bind(
    blueprint: Blueprint, memory: HostMemory
) -> tuple[list[BoundUnit], PersistentState | None]:
    def bound(unit: Unit) -> BoundUnit:
        return BoundUnit(
            unit, blueprint.found.parameters,
            dtype=blueprint.compute_dtype, device=blueprint.device,
        )  # fmt: skip

    small = blueprint.found.persistent
    persistent = None
    if small is not None:
        persistent = PersistentState(
            bound(small), memory.persistent, grad_bytes=blueprint.formats.grad
        )
    return [bound(unit) for unit in blueprint.found.units], persistent


def _load(
    blueprint: Blueprint, ledger: Ledger, queue: aio.Queue, memory: HostMemory,
    persistent: PersistentState | None, resumed: bool,
) -> None:  # fmt: skip
    """Take the committed generation as it is, or make generation 0 of the model's values."""
    store, units = ledger.store, blueprint.units
    if resumed:
        record = store.committed
        assert record is not None
        ledger.sides.update({unit.index: record.sides[unit.name] for unit in units})
        ledger.zero_moments = {
            unit.index for unit in units if record.flags[unit.name] & UnitFlag.MOMENTS_ZERO
        }
    writer = InitialWriter(queue, memory.fetch, chunk_elems=blueprint.placement.chunk_elems)
    parameters = blueprint.found.parameters
    for unit in blueprint.found.units:
        if not resumed:
            sides = (0, 1) if unit.num_elems > unit.trainable_elems else (0,)

            def place(role: Role, side: int, name: str = unit.name) -> Any:
                return store.extent(name, role, side)

            writer.write(unit, parameters, sides, place)
    writer.finish()
    if persistent is not None:
        _load_persistent(ledger, queue, persistent, resumed)
    if not resumed:
        store.begin()
        store.commit(
            sides={unit.name: 0 for unit in units}, generation=0, flags=initial_flags(units)
        )


def _load_persistent(
    ledger: Ledger, queue: aio.Queue, persistent: PersistentState, resumed: bool
) -> None:
    store, unit = ledger.store, persistent.unit
    moments = unit.index not in ledger.zero_moments
    if resumed:
        persistent.initialise()  # zeros where nothing was written
        side = ledger.sides[unit.index]
        persistent.transfer(
            queue.read, lambda role: store.extent(unit.name, role, side), moments=moments
        )
        return
    persistent.initialise()
    for side in (0, 1):  # frozen tensors are never written again
        persistent.transfer(
            queue.write, lambda role, to=side: store.extent(unit.name, role, to), moments=False
        )


def _keeper(
    blueprint: Blueprint, store: Store, queue: aio.Queue, device: Device, memory: HostMemory,
    persistent: PersistentState | None, ledger: Ledger, metrics: Metrics,
) -> GradientKeeper:  # fmt: skip
    rounded = blueprint.config.dtype
    kept_dtype = torch.bfloat16 if blueprint.formats.grad == 2 else torch.float32
    first = 0
    kept = []
    for unit in blueprint.units:
        spilled = unit.index in blueprint.placement.spilled
        region = memory.held.get(unit.index)
        if persistent is not None and unit is persistent.unit:
            region = persistent.grad
        num_bytes = grad_bytes(unit, blueprint.formats)
        file = store.scratch(f"grad-{unit.index}", num_bytes) if spilled else None
        kept.append(KeptUnit(unit, region, first, file))
        first += len(unit.slots)
    return GradientKeeper(
        kept, GradFormat(rounded, kept_dtype), queue=queue, device=device, slots=memory.spill,
        chunk_elems=blueprint.placement.chunk_elems, deadline=ledger.deadline, wait=ledger.wait,
        metrics=metrics,
    )  # fmt: skip


def module_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers by name; they belong to the generation (DESIGN M5)."""
    return {name: buffer.detach().cpu() for name, buffer in model.named_buffers()}


def take_over(model: nn.Module, parts: Parts) -> None:
    """Move buffers to the device and make `model.state_dict()` give full weights."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(parts.blueprint.device)
    known = parts.names_by_id
    places = [
        (name, known[id(parameter)])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in known
    ]

    def begin(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        parts.guard.making_state_dict = True

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        parts.guard.making_state_dict = False
        wanted = [(key, name) for key, name in places if prefix + key in state]
        names = list(dict.fromkeys(name for _, name in wanted))
        dtype = parts.blueprint.config.dtype
        tensors = snapshot(parts.reader, names, dtype, parts.store.folders[0])
        for key, name in wanted:
            state[prefix + key] = tensors[name]

    for handle in (
        model.register_state_dict_pre_hook(begin), model.register_state_dict_post_hook(fill)
    ):  # fmt: skip
        parts.closing.callback(handle.remove)
