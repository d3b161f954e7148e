"""Make what the blueprint says: open or create the store, allocate and divide the host budget."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from offload import kernels
from offload.checkpoint.folder import is_checkpoint
from offload.config import EngineConfig
from offload.engine.blueprint import Blueprint, describe_layout, spill_bytes
from offload.errors import StoreError
from offload.memory.slab import Region, Slab, Slots
from offload.partition.states import Role
from offload.schedule.placement import grad_bytes
from offload.store import lineage
from offload.store.extents import UnitExtents
from offload.store.store import Store, exists

_LOG = logging.getLogger(__name__)


def open_store(blueprint: Blueprint) -> tuple[Store, bool]:
    """Open or create the store; True: it resumes a generation."""
    config = blueprint.config
    name = lineage.newest(config.nvme_path, blueprint.name)
    layout = describe_layout(blueprint)
    if config.read_only:
        return _open_read_only(config, name, layout), True
    resume = config.resume
    if resume == "auto":
        resume = exists(config.nvme_path, name)
    if resume:
        store = Store.open(config.nvme_path, name, layout=layout, durability=config.durability)
        _check_sides(store, config.durability)
        lineage.discard_others(config.nvme_path, blueprint.name, name)
        return store, True
    store = create_store(blueprint, name, fresh=resume is False)
    lineage.discard_others(config.nvme_path, blueprint.name, name)
    return store, False


def create_store(blueprint: Blueprint, name: str, *, fresh: bool) -> Store:
    """Reserve a store for what was decided, under `name`."""
    config = blueprint.config
    extents = [UnitExtents.of(unit) for unit in blueprint.units]
    return Store.create(
        config.nvme_path, name, extents, layout=describe_layout(blueprint),
        durability=config.durability, num_sides=1 if config.durability == "none" else 2,
        fresh=fresh, advice=config.existing_store, rates=blueprint.drives.rates,
        scratch_bytes=spill_bytes(blueprint),
    )  # fmt: skip


def _open_read_only(config: EngineConfig, name: str, layout: dict[str, Any]) -> Store:
    """Open a store that somebody else may own, or a checkpoint, which is a folder of its own."""
    (first, *others) = config.nvme_path
    if not others and is_checkpoint(first):
        return Store.open_folder(first, layout=layout)
    return Store.open(config.nvme_path, name, layout=layout, read_only=True)


def _check_sides(store: Store, durability: str) -> None:
    """Refuse to promise more than a store with one side can keep, and less than one with two does.

    What memory alone holds lies on the only side.
    """
    if store.manifest.num_sides > 1 and durability == "none":
        store.close()
        raise StoreError(
            f'store {store.folders[0]}: expected one side for durability="none", got two: it was'
            ' made with "process" or "step". Go on with one of these, or save a checkpoint and load'
            ' it into a new store made with "none".'
        )
    if store.manifest.num_sides == 1 and durability != "none":
        store.close()
        raise StoreError(
            f"store {store.folders[0]}: expected two sides for durability={durability!r}, got one:"
            ' it was made with durability="none". Go on with that, or save a checkpoint and'
            " load it into a new store."
        )


@dataclass(frozen=True)
class HostMemory:
    """The slab and its pieces."""

    slab: Slab
    fetch: Slots
    landing: Slots
    update: Region
    spill: Slots
    persistent: Region
    held: dict[int, Region]  # gradients by unit
    resident: dict[tuple[int, Role], Region]
    copies: dict[tuple[int, Role], Region]  # to go back to, of some of them


def divide(blueprint: Blueprint) -> HostMemory:
    """Allocate the host budget as the placement says."""
    p = blueprint.placement
    # On a CPU the device is this memory too (DESIGN M1); elsewhere no state is placed there.
    slab = Slab(p.total_bytes + p.on_device_bytes)
    persistent = slab.region(p.persistent_bytes)
    held = {
        unit.index: slab.region(grad_bytes(unit, blueprint.formats))
        for unit in blueprint.found.units
        if unit.index in p.held
    }
    stays = (*p.resident, *p.on_device)
    resident = {(each.unit, each.role): slab.region(each.num_bytes) for each in stays}
    copies = {
        (each.unit, each.role): slab.region(each.num_bytes)
        for each in stays
        if each.unit in p.undo.copied
    }
    fetch = slab.region(p.fetch_slots * p.fetch_slot_bytes)
    update = slab.region(p.update_slots * p.update_slot_bytes)
    spill = slab.region(p.spill_slots * p.spill_slot_bytes)
    landing = slab.region(p.landing_slots * p.landing_slot_bytes)
    return HostMemory(
        slab, Slots(fetch, p.fetch_slots, p.fetch_slot_bytes),
        Slots(landing, p.landing_slots, p.landing_slot_bytes), update,
        Slots(spill, p.spill_slots, p.spill_slot_bytes), persistent, held, resident, copies,
    )  # fmt: skip


def kernel_threads(blueprint: Blueprint) -> kernels.Threads | None:
    """Threads of fills and conversions on a CPU device."""
    return kernels.Threads(blueprint.threads.fill) if blueprint.device.type == "cpu" else None
