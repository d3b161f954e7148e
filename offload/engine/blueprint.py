"""Decide everything about an engine before anything is allocated: units, formats, budgets, threads.

All that can fail for a reason of the user's fails here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.checkpoint.folder import is_checkpoint
from offload.checkpoint.regroup import trained_in
from offload.config import EngineConfig
from offload.engine.drives import Drives, plan_drives
from offload.errors import BudgetError, ConfigError, StoreError
from offload.optim.packing import Packing, num_state_elems
from offload.optim.rules import Rule
from offload.optim.torch_rule import TorchRule
from offload.partition.chunk import CHUNK_MULTIPLE
from offload.partition.described import describe_units, tensors_of
from offload.partition.states import WHOLE_STATE_BYTES, Role, StateTable
from offload.partition.unit import Unit, round_up
from offload.partition.weights import Weights
from offload.runtime.discover import Discovery, discover
from offload.schedule.device import (
    check_device,
    choose_kept,
    device_least_bytes,
    leaving_bytes,
    other_bytes,
    weight_bytes,
)
from offload.schedule.placement import Formats, Placement, grad_bytes, place
from offload.schedule.resident import (
    Candidate,
    candidates,
    check_forced,
    states_of,
    unwritten,
)
from offload.schedule.undo import Terms, choose_undo, in_memory
from offload.store import lineage
from offload.store.extents import UnitExtents
from offload.store.folder import MANIFEST_NAME
from offload.store.format import decode_manifest
from offload.threads import Processors, ThreadPlan, plan_threads

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blueprint:
    """Decisions about a model, made before anything is allocated."""

    config: EngineConfig
    name: str  # of the store
    model: nn.Module
    device: torch.device
    compute_dtype: torch.dtype
    found: Discovery
    formats: Formats
    placement: Placement
    device_memory: int
    threads: ThreadPlan
    drives: Drives
    rule: Rule
    packings: Mapping[str, Packing]  # of units by name; empty: states are as the weights are
    states: StateTable

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units, the persistent one last."""
        return self.found.units + ((self.found.persistent,) if self.found.persistent else ())

    @property
    def overlap(self) -> str:
        """The setting, or "hold" where no update can be taken back."""
        return self.placement.undo.overlap

    @property
    def weight_capacity(self) -> int:
        """Bytes of the device budget for weights of units that come and go.

        `max_live_parameters` bounds it, but for the largest unit and one prefetch.
        """
        found, room = self.found, self._room - self.leaving_bytes
        if self.config.max_live_parameters is None:
            return room
        whole = max((weight_bytes([unit], self.formats) for unit in found.units), default=0)
        live = self.config.max_live_parameters * self.compute_dtype.itemsize
        return min(room, max(live, 2 * whole))

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the device budget for gradients that are being copied out."""
        most = leaving_bytes(
            self.device_memory, self.found.units, self.found.persistent, self.formats,
            alive=alive_steps(self.config),
        )  # fmt: skip
        return max(min(most, self._room), 0)

    @property
    def _room(self) -> int:
        """What the device budget leaves beside weights that stay, and gradients of one unit."""
        found, placement = self.found, self.placement
        kept = [unit for unit in found.units if unit.index in placement.kept]
        alive = alive_steps(self.config)
        taken = other_bytes(found.units, found.persistent, self.formats, alive=alive)
        taken += weight_bytes(kept, self.formats) + placement.on_device_bytes
        return self.device_memory - taken


def plan(
    model: nn.Module, config: EngineConfig, rule: Rule, *,
    name: str | None = None, trained: Collection[str] | None = None,
) -> Blueprint:  # fmt: skip
    """Decide everything; raises ConfigError or BudgetError.

    `name` of the store and `trained`, parameters with state: those of a store that grows.  None:
    as the configuration and the model say; a store that is resumed knows what is trained.
    """
    device = _indexed(
        config.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )  # fmt: skip
    _check_place(config, device)
    compute = config.compute_dtype or default_compute_dtype(device, config.dtype)
    weights = Weights(str(config.dtype).removeprefix("torch."))
    states = replace(choose_states(rule, config.state_dtype), weights=weights)
    found, name = _find(model, config, rule, states, name=name, trained=trained)
    several = config.gradient_accumulation_steps > 1
    formats = Formats(
        weight=max((u.states.weights.fetched_bytes for u in found.units), default=2),
        compute=compute.itemsize, grad=4 if several else config.dtype.itemsize, states=states,
        landing=_landing(device, found.units, compute),
    )  # fmt: skip
    device_memory = config.device_memory or _free_device(device, found, formats, config)
    host = config.host_memory or default_host_memory()
    units = found.units + ((found.persistent,) if found.persistent else ())
    packings = pack(rule, units)
    placement = place_all(config, found, formats, host_memory=host, whole=bool(packings))
    placement = place_on_device(config, found, formats, placement, device_memory=device_memory)
    drives = plan_drives(config)
    terms = _undo_terms(config, drives, shared=not has_own_memory(device))
    placement = place_undo(found, placement, terms, room=host - placement.total_bytes)
    threads = plan_threads(  # beside a GPU, too, a thread of the model's gives it its work
        Processors.here(), beside_compute=placement.undo.overlap != "hold",
        update_threads=config.update_threads, update_cpus=config.update_cpus,
    )  # fmt: skip
    return Blueprint(
        config, name, model, device, compute, found, formats, placement, device_memory, threads,
        drives, rule, packings, states,
    )  # fmt: skip


def _find(
    model: nn.Module, config: EngineConfig, rule: Rule, states: StateTable, *,
    name: str | None, trained: Collection[str] | None,
) -> tuple[Discovery, str]:  # fmt: skip
    """The units of `model` and the name of their store; `name` and `trained` as of plan()."""
    find = partial(
        discover, model, persistence_threshold=config.param_persistence_threshold, states=states,
        state_elems=_state_elems(rule), most_persistent=config.model_persistence_threshold,
    )  # fmt: skip
    found = find(trained=trained)
    if not found.parameters:
        raise ConfigError(f"model {type(model).__name__}: expected float parameters, got none.")
    name = name or config.name or _layout_name(model, _layout(config, rule, found, states))
    if trained is None and config.resume is not None and config.resume is not False:
        found = find(trained=_stored_trained(config, name, found))
    return found, name


def place_all(
    config: EngineConfig, found: Discovery, formats: Formats, *, host_memory: int, whole: bool
) -> Placement:
    """Divide the host budget.  `whole`: the optimizer takes whole tensors."""
    # Then the largest unit is one chunk, and the budget must hold it.
    largest = max((round_up(unit.num_elems, CHUNK_MULTIPLE) for unit in found.units), default=None)
    # Beside another owner nothing may be kept: it changes what is read.
    offered = [] if whole or config.read_only else offer(found.units, config)
    placement = place(
        found.units, found.persistent, formats, host_memory=host_memory,
        chunk_elems=largest if whole else config.chunk_elems, offered=offered,
    )  # fmt: skip
    check_forced(offered, placement.resident, config.placement)
    return placement


def place_on_device(
    config: EngineConfig, found: Discovery, formats: Formats, placement: Placement, *,
    device_memory: int,
) -> Placement:  # fmt: skip
    """Divide the device budget; raises BudgetError where it cannot hold what it must."""
    state: list[Candidate] = []
    if config.placement.state == "device" and not config.read_only:
        state = list(states_of(found.units, _role_bytes))
    num_bytes = sum(each.num_bytes for each in state)
    alive = alive_steps(config)
    check_device(
        device_memory, found.units, found.persistent, formats, state=num_bytes, alive=alive
    )  # fmt: skip
    wanted = config.placement
    if wanted.weights == "auto" and config.max_live_parameters is not None:
        wanted = replace(wanted, weights="disk")  # a bound on what is gathered
    taken = other_bytes(found.units, found.persistent, formats, alive=alive) + num_bytes
    if wanted.weights != "device":
        taken += leaving_bytes(
            device_memory, found.units, found.persistent, formats, alive=alive
        )  # fmt: skip
    kept = choose_kept(found.units, device_memory, formats, wanted=wanted, taken=taken)
    left: frozenset[tuple[int, Role]] = frozenset()
    if config.durability == "none" and not config.read_only:
        left = unwritten(found.units, found.persistent, [*placement.resident, *state])
    return replace(placement, kept=kept, on_device=tuple(state), unwritten=left)


def _indexed(device: torch.device) -> torch.device:
    """Which GPU is meant, whatever device other threads have as their current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def has_own_memory(device: torch.device) -> bool:
    """True where weights are copied to the device, and gradients from it."""
    return device.type != "cpu"


def _landing(device: torch.device, units: Sequence[Unit], compute: torch.dtype) -> int:
    """Bytes of the widest gradient that is copied from the device."""
    if not has_own_memory(device):
        return 0
    return max((4 if u.states.weights.exact else compute.itemsize for u in units), default=4)


def _undo_terms(config: EngineConfig, drives: Drives, *, shared: bool) -> Terms:
    read = drives.speeds.read if drives.speeds else None
    one_side = config.durability == "none"
    return Terms(config.overlap, one_side, shared, bool(config.gradient_clipping), read)


def place_undo(
    found: Discovery, placement: Placement, terms: Terms, *, room: int
) -> Placement:  # fmt: skip
    """Give what the host budget has left to copies; raises where nothing can run ahead as asked."""
    stays = [*placement.resident, *placement.on_device]
    undo = choose_undo(found.units, stays, placement.unwritten, room=room, terms=terms)
    if terms.overlap == "speculate" and undo.overlap == "hold":
        ample = choose_undo(found.units, stays, placement.unwritten, room=1 << 62, terms=terms)
        if not ample.copied:
            raise ConfigError(
                "overlap: expected 'hold' or 'auto' with durability='none' where no unit stays in"
                " memory whole, got 'speculate'. An update in place on disk cannot be taken back."
                " Use durability='process', or a host_memory that keeps weights and state."
            )
        sizes = in_memory(found.units, stays)
        least = min(sizes[index] for index in ample.copied)
        raise BudgetError(
            "overlap: expected room in host memory for a copy of one unit at least, which"
            f" 'speculate' goes back to with durability='none', {least:,} bytes, got {room:,}."
            " Raise host_memory, or use 'hold'."
        )
    return replace(placement, undo=undo)


def alive_steps(config: EngineConfig) -> int:
    """Micro-steps whose gradients of one unit are on the device at once."""
    return config.gradient_accumulation_steps if config.order == "layer" else 1


def offer(units: Sequence[Unit], config: EngineConfig) -> list[Candidate]:
    """What may stay in host memory."""
    return list(candidates(units, _role_bytes, wanted=config.placement))


def _role_bytes(unit: Unit, role: Role) -> int:
    return UnitExtents.of(unit).role_bytes[role]


def _check_place(config: EngineConfig, device: torch.device) -> None:
    if config.placement.state == "device" and device.type != "cpu":
        raise ConfigError(
            f"placement: expected state in 'host', 'disk' or 'auto' with device {device}, got"
            " 'device'. Updates run on the processor: state on that device would travel at each."
        )


def choose_states(rule: Rule, dtype: str) -> StateTable:
    """The roles of the rule's states; raises ConfigError for a type that it cannot have."""
    if not isinstance(rule, TorchRule):
        return StateTable.of(rule.states, dtype)
    if dtype != "fp32":
        raise ConfigError(
            f"state_dtype: expected 'fp32' with optimizer {rule.name}, which has no kernel, got"
            f" {dtype!r}. Leave it out."
        )
    if rule.whole:
        return StateTable(("packed",), dtype, whole=True)
    return StateTable.of(rule.states, dtype)


def _state_elems(rule: Rule) -> Callable[[str, tuple[int, ...]], int] | None:
    """The size of a whole tensor's states; None for an optimizer that runs on pieces."""
    if not (isinstance(rule, TorchRule) and rule.whole):
        return None
    return lambda name, shape: num_state_elems(rule.state_shapes(shape, f"parameter {name}"))


def pack(rule: Rule, units: Iterable[Unit]) -> dict[str, Packing]:
    """Where the states of whole tensors lie; nothing for an optimizer that runs on pieces."""
    if not (isinstance(rule, TorchRule) and rule.whole):
        return {}
    packings = {unit.name: Packing.of(unit, rule.state_shapes) for unit in units}
    for unit in units:
        most, found = WHOLE_STATE_BYTES * unit.trainable_elems, 4 * packings[unit.name].num_elems
        if found > most:
            raise ConfigError(
                f"optimizer {rule.name}, unit {unit.name!r}: expected states of at most {most:,}"
                f" bytes, {WHOLE_STATE_BYTES} a parameter, got {found:,}. Take another optimizer."
            )
    return packings


def default_compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """16 bits where their products are native, else fp32: emulated, they take 5 to 200 times."""
    if dtype is not torch.bfloat16:
        return dtype if device.type == "cuda" else torch.float32
    native = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if native and device.type == "cpu":
        flags = _cpu_flags()
        native = "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags
    if not native:
        _LOG.info("bf16 products are emulated on this CPU: computing in float32.")
    return torch.bfloat16 if native else torch.float32


def _cpu_flags() -> set[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return set(line.split(":", 1)[1].split())
    return set()


def default_host_memory() -> int:
    """Half of what is available, cgroup limits included."""
    available = 1 << 62
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            available = min(available, int(file.read()))
    return available // 2


def _free_device(
    device: torch.device, found: Discovery, formats: Formats, config: EngineConfig
) -> int:
    """What there is, or, where it is ordinary memory, three largest units and what is asked for."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(0.8 * free)
    units = found.units
    needed = device_least_bytes(units, found.persistent, formats, alive=alive_steps(config))
    needed += max((weight_bytes([unit], formats) for unit in units), default=0)
    if config.placement.weights == "device":
        needed += weight_bytes(units, formats)
    if config.placement.state == "device":
        needed += sum(each.num_bytes for each in states_of(units, _role_bytes))
    return needed


def describe_layout(blueprint: Blueprint) -> dict[str, Any]:
    """What a store is compared with when it is opened."""
    return _layout(blueprint.config, blueprint.rule, blueprint.found, blueprint.states)


def _layout(
    config: EngineConfig, rule: Rule, found: Discovery, states: StateTable
) -> dict[str, Any]:  # fmt: skip
    dtype = str(config.dtype).removeprefix("torch.")
    units = found.units + ((found.persistent,) if found.persistent else ())
    return {"dtype": dtype, "optimizer": rule.name, **describe_units(units, states)}


def _layout_name(model: nn.Module, layout: Mapping[str, Any]) -> str:
    """A hash of the model's layout, as it is wrapped."""
    # Not the optimizer and its state: the same model with another one must find this store, and be
    # refused.
    tensors = sorted(tensors_of(layout).items())
    text = json.dumps([layout["dtype"], tensors], sort_keys=True)
    return f"{type(model).__name__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _stored_trained(config: EngineConfig, name: str, found: Discovery) -> set[str] | None:
    """Which parameters have state in the store that is resumed; None: there is no such store."""
    layout = stored_layout(config, name)
    if layout is None:
        return None
    return trained_in(layout) & found.parameters.keys()


def stored_layout(config: EngineConfig, name: str) -> Mapping[str, Any] | None:
    """The layout of the store, or the checkpoint, that lies there."""
    (first, *others) = config.nvme_path
    if config.read_only and not others and is_checkpoint(first):
        with contextlib.suppress(StoreError, OSError):  # opening it tells
            where = first / MANIFEST_NAME
            return decode_manifest(where.read_bytes(), str(where)).layout
        return None
    return lineage.layout_of(config.nvme_path, name)


def spill_bytes(blueprint: Blueprint) -> int:
    """Disk bytes for gradients that the host budget cannot hold."""
    spilled = blueprint.placement.spilled
    return sum(grad_bytes(u, blueprint.formats) for u in blueprint.units if u.index in spilled)


def state_bytes(units: tuple[Unit, ...]) -> int:
    """Bytes of one side of all state."""
    return sum(unit.role_bytes(role) for unit in units for role in unit.roles)
