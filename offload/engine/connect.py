"""Connect the parts of an engine after the decisions are made (assembly.py).

store <- ledger <- fetcher <- residency <- hooks -> keeper -> stepper -> pipeline -> store
"""

from __future__ import annotations

import contextlib
import logging
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import aio
from offload.engine.assembly import HostMemory, divide, kernel_threads, open_store
from offload.engine.blueprint import Blueprint
from offload.engine.drives import open_queue
from offload.engine.editor import Editor
from offload.engine.ledger import Ledger
from offload.engine.loading import read_committed, read_persistent, write_initial
from offload.engine.measuring import begin_metrics
from offload.engine.reader import Reader, current, snapshot
from offload.engine.speculate import Assumption, Speculator
from offload.engine.step import Groups, Stepper
from offload.engine.updates import UpdateBuilder
from offload.engine.write_back import WriteBack
from offload.errors import ConfigError
from offload.masters import moved_dtype
from offload.memory.host import trim_heap
from offload.memory.slab import Region
from offload.metrics import Metrics
from offload.optim.choice import progress_of
from offload.optim.jobs import Pipeline
from offload.optim.loss_scale import LossScale
from offload.optim.pipeline import UpdatePipeline
from offload.optim.rules import Progress
from offload.optim.torch_pipeline import TorchPipeline
from offload.optim.torch_rule import TorchRule
from offload.partition.unit import Role, Unit
from offload.runtime.binding import BoundUnit
from offload.runtime.device import Device, StreamDevice, make_device
from offload.runtime.evicted import branch_of_trees, guard_class
from offload.runtime.fetch import Fetcher
from offload.runtime.gradients import GradientKeeper, KeptUnit
from offload.runtime.guard import ParameterGuard
from offload.runtime.hooks import Hooks
from offload.runtime.horizon import Horizon
from offload.runtime.idle import IdleGradients
from offload.runtime.landing import InPlace, Landed, Landing
from offload.runtime.lent import LentGradients
from offload.runtime.persistent import PersistentState
from offload.runtime.residency import Residency
from offload.runtime.resident import ResidentBuffers
from offload.runtime.room import DeviceRoom
from offload.runtime.source import FilePlace, InitialValues
from offload.runtime.spill import Spiller, SpillFile
from offload.schedule.placement import SUM_BYTES, grad_bytes
from offload.store.store import Store

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captures:
    """How the engine's own state is captured for a commit."""

    state: Callable[[], dict[str, Any]]
    late: Callable[[], dict[str, Any]]  # what steps after step()
    groups: Groups
    before_forward: Callable[[], Hooks]  # something may be trained that was not; who goes on


@dataclass(frozen=True)
class Opened:
    """A store that is there, and what an engine has that goes on with it."""

    store: Store
    resumed: bool
    metrics: Metrics
    attached: contextlib.ExitStack


@dataclass(frozen=True)
class Ground:
    """What everything else stands on."""

    blueprint: Blueprint
    store: Store
    resumed: bool
    metrics: Metrics
    queue: aio.Queue
    memory: HostMemory
    device: Device
    ledger: Ledger
    persistent: PersistentState | None
    resident: ResidentBuffers
    attached: contextlib.ExitStack  # what others have made for this engine; closed first
    closing: contextlib.ExitStack  # closes everything, in reverse order of construction; a store
    # that was made just now is removed if it leaves with an error


@dataclass(frozen=True)
class Parts:
    """Everything an engine is made of."""

    ground: Ground
    keeper: GradientKeeper
    lent: LentGradients
    residency: Residency
    guard: ParameterGuard
    hooks: Hooks
    stepper: Stepper
    speculator: Speculator
    counts: Progress
    scale: LossScale
    reader: Reader
    editor: Editor
    names_by_id: dict[int, str]  # parameters
    captures: Captures
    frozen: set[str]  # parameters, when the last forward with gradients began; or without state


def connect(
    blueprint: Blueprint, captures: Captures, places: Mapping[str, FilePlace], *,
    opened: Opened | None = None,
) -> Parts:  # fmt: skip
    """Allocate, open, write or resume, bind.  Unmakes everything if it fails.

    `places`: files that hold parameters' values.  `opened`: what the engine has already.
    """
    with contextlib.ExitStack() as undo:
        closing = contextlib.ExitStack()
        undo.push(closing)
        if opened is None:
            store, resumed = open_store(blueprint)
            opened = Opened(store, resumed, Metrics(), contextlib.ExitStack())
        store = opened.store
        closing.callback(store.close)
        if store.committed is None:
            closing.push(_remove_on_error(store))
        ground = _lay_ground(blueprint, opened, captures, closing=closing)
        _load(ground, places)
        parts = _build(ground, captures)
        go_on = store.committed is not None
        begin_metrics(ground.metrics, blueprint, ground.queue, resumed=go_on, closing=closing)
        undo.pop_all()
        return parts


def _remove_on_error(store: Store) -> Callable[..., bool]:
    def leave(kind: object, error: object, trace: object) -> bool:
        if kind is not None:
            store.remove()
        return False

    return leave


def _lay_ground(
    blueprint: Blueprint, opened: Opened, captures: Captures, *, closing: contextlib.ExitStack
) -> Ground:  # fmt: skip
    store, metrics = opened.store, opened.metrics
    queue = open_queue(blueprint.drives)
    closing.callback(queue.close)
    memory = divide(blueprint)
    closing.callback(memory.slab.close)
    queue.register(memory.slab.buffer)
    threads = kernel_threads(blueprint)
    if threads is not None:
        closing.callback(threads.close)
    device = make_device(blueprint.device, threads)
    closing.callback(device.register(memory.slab.buffer.address, memory.slab.num_bytes))
    units = {unit.index: unit for unit in blueprint.units}
    small = blueprint.found.persistent
    persistent = None
    if small is not None:
        state = memory.persistent
        persistent = PersistentState(_bind(blueprint, small), state, grad_bytes=SUM_BYTES)
    write_back = WriteBack(
        store, queue, metrics, units=units, regions=_in_memory(memory, persistent),
        unwritten=blueprint.placement.unwritten,
    )  # fmt: skip
    ledger = Ledger(store, units, metrics, capture_late=captures.late, write_back=write_back)
    return Ground(
        blueprint, store, opened.resumed, metrics, queue, memory, device, ledger, persistent,
        ResidentBuffers(memory.resident, queue, ledger, copies=memory.copies), opened.attached,
        closing,
    )  # fmt: skip


def _in_memory(
    memory: HostMemory, persistent: PersistentState | None
) -> Mapping[tuple[int, Role], Region]:
    """Where the buffers that stay are; resident ones change places with their copies."""
    small: dict[tuple[int, Role], Region] = {}
    if persistent is not None:
        index = persistent.unit.index
        small = {(index, role): persistent.region(role) for role in persistent.unit.roles}
    return ChainMap(small, memory.resident)


def _bind(blueprint: Blueprint, unit: Unit) -> BoundUnit:
    parameters = blueprint.found.parameters
    exact = unit.states.weights.exact
    dtype = torch.float32 if exact else blueprint.compute_dtype
    stays = unit.index in blueprint.placement.kept
    return BoundUnit(unit, parameters, dtype=dtype, device=blueprint.device, stays=stays)


def _build(ground: Ground, captures: Captures) -> Parts:
    blueprint = ground.blueprint
    guard, residency = _residency(ground)
    keeper = _keeper(ground)
    ground.closing.callback(keeper.close)
    scale = LossScale(blueprint.config)
    lent = _lent(ground, guard, residency, keeper, scale=scale)
    stepper, speculator, counts = _optimization(ground, captures, residency, lent, scale)
    keeper.before_take = speculator.before_take
    persistent = ground.persistent.bound if ground.persistent else None
    small = [persistent] if persistent else []
    idle = IdleGradients(
        # With a loss scale what a user assigns is unscaled, and what autograd adds to is not.
        guard, lambda: scale.enabled or lent.has_gradients,
        lambda: [*residency.present.values(), *small],
    )  # fmt: skip
    residency.before_phase = idle.follow
    idle.show()
    ground.closing.callback(idle.hide)
    hooks = Hooks(
        blueprint.model, blueprint.found.hooks, residency, keeper,
        persistent=persistent, before_forward=captures.before_forward, listener=speculator,
    )  # fmt: skip
    hooks.last_micro_step = blueprint.config.gradient_accumulation_steps == 1
    ground.closing.callback(hooks.close)
    units = {unit.index: unit for unit in blueprint.units}
    reader = Reader(ground.queue, ground.ledger, units, ground.persistent, resident=ground.resident)
    editor = Editor(
        residency, ground.ledger, reader, ground.queue, ground.persistent, idle=idle,
        resident=ground.resident, chunk_elems=blueprint.placement.chunk_elems,
        capture=captures.state, stop_updates=speculator.discard, catch_up=lambda: catch_up(ground),
    )  # fmt: skip
    found = blueprint.found.parameters
    names = {id(parameter): name for name, parameter in found.items()}
    parts = Parts(
        ground, keeper, lent, residency, guard, hooks, stepper, speculator, counts, scale, reader,
        editor, names, captures, _untrained(blueprint),
    )  # fmt: skip
    ground.ledger.lost = lambda units: _lose(parts, units)
    return parts


def _untrained(blueprint: Blueprint) -> set[str]:
    """Names of the parameters that are frozen, or not and without state in what is resumed."""
    slots = [slot for unit in blueprint.units for slot in unit.slots]
    stateless = {slot.tensor.name for slot in slots if not slot.tensor.trainable}
    found = blueprint.found.parameters.items()
    return stateless | {name for name, parameter in found if not parameter.requires_grad}


def engine_called(parts: Parts) -> None:
    """A forward begins: what an exception left half-way is put right."""
    parts.guard.loading = None
    catch_up(parts.ground)
    parts.ground.ledger.engine_called()


def outdate(parts: Parts, units: Collection[int]) -> None:
    """An update of `units` was submitted: the device holds their former weights."""
    small = parts.ground.persistent
    for unit in units:
        if small is not None and unit == small.unit.index:
            small.outdate()
        else:
            parts.residency.bound[unit].outdate()


def _lose(parts: Parts, units: Collection[int]) -> None:
    """An update of `units` is lost: what memory has of it gives way to the generation before."""
    ground, small = parts.ground, parts.ground.persistent
    parts.residency.discard_prefetches()
    outdate(parts, units)
    ground.resident.rewritten(units)
    if small is not None and small.unit.index in units:
        small.lose(lambda: read_persistent(ground.ledger, ground.queue, small))


def catch_up(ground: Ground) -> None:
    """Bring the small tensors on the device up to date; waits for their update."""
    if ground.persistent is not None:
        made = partial(ground.ledger.wait, made=True)
        ground.persistent.catch_up(ground.device, made)


def _optimization(
    ground: Ground,
    captures: Captures,
    residency: Residency,
    lent: LentGradients,
    scale: LossScale,
) -> tuple[Stepper, Speculator, Progress]:
    blueprint, placement = ground.blueprint, ground.blueprint.placement
    config, keeper = blueprint.config, lent.keeper
    pipeline = blueprint.threads.apart(lambda: _pipeline(ground))
    ground.closing.callback(pipeline.close)
    builder = UpdateBuilder(
        pipeline, ground.ledger, keeper, ground.persistent, resident=ground.resident,
        chunk_elems=placement.chunk_elems,
    )  # fmt: skip
    counts = progress_of(blueprint.rule)
    units = blueprint.found.units
    stepper = Stepper(
        units, blueprint.found.persistent, names=list(blueprint.found.parameters),
        max_norm=config.gradient_clipping, groups=captures.groups, ledger=ground.ledger,
        lent=lent, builder=builder, counts=counts, scale=scale, metrics=ground.metrics,
    )  # fmt: skip
    speculator = Speculator(
        placement.undo, {unit.index: unit for unit in units}, builder, ground.ledger, keeper,
        loans=residency.loans,
        assume=lambda: Assumption(stepper.assume(), residency.order()),
    )  # fmt: skip
    ground.closing.callback(speculator.discard)
    return stepper, speculator, counts


def _pipeline(ground: Ground) -> Pipeline:
    """The pipeline in C, or the slow one for torch classes."""
    rule, placement = ground.blueprint.rule, ground.blueprint.placement
    if isinstance(rule, TorchRule):
        _LOG.warning("optimizer %s has no kernel: its updates run in torch, slowly.", rule.name)
        return TorchPipeline(
            ground.queue, ground.memory.update.view, rule, num_slots=placement.update_slots,
            slot_bytes=placement.update_slot_bytes, packings=ground.blueprint.packings,
        )  # fmt: skip
    return UpdatePipeline(
        ground.queue, ground.memory.update.view, num_slots=placement.update_slots,
        slot_bytes=placement.update_slot_bytes,
        num_threads=ground.blueprint.threads.update,
    )  # fmt: skip


def _load(ground: Ground, places: Mapping[str, FilePlace]) -> None:
    """Take the committed generation as it is, or make generation 0 of the model's values."""
    blueprint, small = ground.blueprint, ground.persistent
    units = blueprint.found.units
    if ground.store.committed is not None:
        read_committed(ground.ledger, ground.queue, small)
    else:
        _check_values(blueprint.found.parameters, places)
        chunk_elems = blueprint.placement.chunk_elems
        values = InitialValues(
            blueprint.found.parameters, places, queue=ground.queue, memory=ground.memory.update,
            chunk_elems=chunk_elems,
        )  # fmt: skip
        write_initial(
            ground.ledger, ground.queue, units, small, memory=ground.memory.fetch.region,
            chunk_elems=chunk_elems, values=values,
        )  # fmt: skip
    ground.resident.reload(unit.index for unit in units)
    if small is not None:
        small.bound.hold()
        small.refresh(ground.device)


def _check_values(
    parameters: Mapping[str, nn.Parameter], places: Mapping[str, FilePlace]
) -> None:  # fmt: skip
    for name, parameter in parameters.items():
        if parameter.is_meta and name not in places:
            raise ConfigError(
                f"parameter {name!r}: expected a value, got one on the meta device. Make the model"
                " under `with offload.on_disk_init(path):`, or load it with"
                " OffloadEngine.from_pretrained(folder, ...)."
            )


def _residency(ground: Ground) -> tuple[ParameterGuard, Residency]:
    blueprint = ground.blueprint
    bound = [_bind(blueprint, unit) for unit in blueprint.found.units]
    guard = ParameterGuard([*bound, *([ground.persistent.bound] if ground.persistent else [])])
    guard_type = guard_class(guard)
    ground.closing.enter_context(branch_of_trees(guard_type))
    for unit in bound:  # their values are in the store now; this frees the model's own memory
        unit.evict(guard_type, ground.device.mark)
    trim_heap()
    fetcher = Fetcher(
        ground.queue, ground.memory.fetch, ground.ledger, ground.device, resident=ground.resident,
        chunk_elems=blueprint.placement.chunk_elems, metrics=ground.metrics,
    )  # fmt: skip
    ground.closing.callback(fetcher.discard)
    config = blueprint.config
    horizon = Horizon(
        [each.unit.num_elems for each in bound],
        prefetch_elems=config.prefetch_bucket_size, reuse_elems=config.max_reuse_distance,
    )  # fmt: skip
    room = DeviceRoom(bound, ground.device, weight_bytes=blueprint.weight_capacity)
    residency = Residency(
        bound, fetcher, guard_type, horizon=horizon, room=room, metrics=ground.metrics,
    )  # fmt: skip
    guard.residency = residency
    return guard, residency


def _keeper(ground: Ground) -> GradientKeeper:
    blueprint = ground.blueprint
    first = 0
    kept = []
    for unit in blueprint.units:
        round_to = moved_dtype(unit.states.weights)
        dtype = round_to if blueprint.formats.grad_of(unit) == 2 else torch.float32
        region = ground.memory.held.get(unit.index)
        if ground.persistent is not None and unit is ground.persistent.unit:
            region = ground.persistent.grad
        spill = None
        if unit.index in blueprint.placement.spilled and not ground.store.read_only:
            file = ground.store.scratch(f"grad-{unit.index}", grad_bytes(unit, blueprint.formats))
            spill = SpillFile(unit, file, dtype)
        kept.append(KeptUnit(unit, first, dtype, round_to, region=region, spill=spill))
        first += len(unit.slots)
    spiller = Spiller(
        ground.queue, ground.memory.spill, chunk_elems=blueprint.placement.chunk_elems,
        deadline=ground.ledger.deadline, metrics=ground.metrics,
    )  # fmt: skip
    return GradientKeeper(
        kept, landing=_landing(ground), spiller=spiller,
        wait=ground.ledger.wait, scratch=ground.store.scratch,
    )  # fmt: skip


def _landing(ground: Ground) -> Landing:
    blueprint, device = ground.blueprint, ground.device
    chunk_elems = blueprint.placement.chunk_elems
    if not isinstance(device, StreamDevice):
        return InPlace(chunk_elems=chunk_elems)
    return Landed(
        device, ground.memory.landing, chunk_elems=chunk_elems,
        room_bytes=blueprint.leaving_bytes, metrics=ground.metrics,
    )  # fmt: skip


def _lent(
    ground: Ground, guard: ParameterGuard, residency: Residency, keeper: GradientKeeper, *,
    scale: LossScale,
) -> LentGradients:  # fmt: skip
    bound = [*residency.bound, *([ground.persistent.bound] if ground.persistent else [])]
    guard.lent = lent = LentGradients(keeper, bound, scale=lambda: scale.factor)
    ground.closing.callback(guard.close)
    keeper.take_back = lent.take_back
    return lent


def take_over(model: nn.Module, parts: Parts) -> None:
    """Move buffers to the device and make `model.state_dict()` give full weights."""
    ground = parts.ground
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(ground.blueprint.device)
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
        store = ground.store
        with current(store):
            folder = None if store.read_only else store.folders[0]  # it may not be ours to write
            tensors = snapshot(parts.reader, names, folder)
        for key, name in wanted:
            state[prefix + key] = tensors[name]

    for handle in (
        model.register_state_dict_pre_hook(begin), model.register_state_dict_post_hook(fill)
    ):  # fmt: skip
        ground.closing.callback(handle.remove)


def module_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers by name; they belong to the generation (DESIGN M5)."""
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers()}
