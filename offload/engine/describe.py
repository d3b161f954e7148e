"""The first lines of a run: what lives where, disk space, bytes written per step."""

from __future__ import annotations

from offload import kernels
from offload.engine.blueprint import state_bytes
from offload.engine.connect import Parts
from offload.engine.left_out import left_out
from offload.partition.unit import Unit
from offload.threads import ThreadPlan


def describe(parts: Parts) -> str:
    """A few lines for people."""
    blueprint, placement = parts.ground.blueprint, parts.ground.blueprint.placement
    units, small = blueprint.found.units, blueprint.found.persistent
    state = state_bytes(blueprint.units)
    num = sum(unit.num_tensor_elems for unit in blueprint.units)
    written = sum(
        unit.byte_of(role, unit.trainable_elems)
        for unit in blueprint.units
        for role in unit.roles
        if (unit.index, role) not in placement.unwritten
    )
    folder = ", ".join(str(path) for path in parts.ground.store.folders)
    found = parts.ground.store.committed.generation if parts.ground.store.committed else 0
    held = len(placement.held)
    moves = str(blueprint.config.dtype).removeprefix("torch.")
    drives = blueprint.drives
    computes = str(blueprint.compute_dtype).removeprefix("torch.")
    lines = [
        f"model     {num:,} parameters in {len(units)} units, {moves} moves, {computes} computes;"
        f" state {_size(state)} ({_size(state + 2 * num)} with gradients)",
        f"disk      {folder}: {_size(parts.ground.store.disk_bytes)} in {_sides(parts)};"
        f" {'resumed' if parts.ground.resumed else 'new'}, generation {found};"
        f" {_size(written)} written per step",
        f"host      {_size(placement.total_bytes)}: {placement.fetch_slots} fetch,"
        f" {placement.update_slots} update, {placement.spill_slots} spill slots of"
        f" {placement.chunk_elems:,} elements; gradients of {held} units"
        f" ({_size(placement.held_bytes)}), {len(placement.spilled)} spilled to disk;"
        f" {_size(placement.resident_bytes)} of weights and state stay",
        f"device    {blueprint.device}: {_size(blueprint.device_memory)}; largest unit"
        f" {_largest(units)};"
        f" {small.num_tensor_elems if small else 0:,} elements of small tensors stay"
        + ("; host memory is not pinned, copies are staged" * parts.ground.device.staged),
        f"engine    {parts.ground.queue.backend}, blocks of {drives.block_bytes >> 10} KiB,"
        f" {drives.read_depth} + {drives.write_depth} in flight a drive ({drives.source});"
        f" kernels {kernels.variant()}",
        f"update    {blueprint.rule.name}, state in {blueprint.states.dtype};"
        f" {_threads(blueprint.threads)}",
    ]
    lines += [f"stays     {reason}" for reason in left_out(blueprint)]
    return "\n".join(lines)


def _sides(parts: Parts) -> str:
    if parts.ground.store.manifest.num_sides == 1:
        return "one side, which a crash loses"
    return "two sides"


def _threads(threads: ThreadPlan) -> str:
    told = [f"threads: {threads.update} update, {threads.fill} fill"]
    if threads.update_cpus:
        told.append(f"updates on processors {', '.join(map(str, threads.update_cpus))}")
    if threads.update_nice:
        told.append("updates yield to the model")
    return "; ".join(told)


def _largest(units: tuple[Unit, ...]) -> str:
    if not units:
        return "none"
    unit = max(units, key=lambda unit: unit.num_elems)
    return f"{unit.name} ({unit.num_elems:,} elements)"


def _size(num_bytes: float) -> str:
    for name, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {name}"
    return f"{num_bytes:.0f} B"
