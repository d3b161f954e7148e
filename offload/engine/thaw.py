"""Train from now on what was frozen when the model was taken over.

    requires_grad_(True)     seen when a forward with gradients begins
      in no group            refused: nobody would ever step it
      without state          the store grows: a successor with another layout is filled with the
                             committed generation, then the engine's parts are made anew over it
      with state             nothing to do: it was trained before, or is in what was resumed

What is never thawed has no state and is never written.  A process that dies meanwhile has one
whole store or both (offload/store/lineage.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload.checkpoint.load import Checkpoint
from offload.checkpoint.regroup import regroup_into
from offload.engine import standstill
from offload.engine.assembly import create_store
from offload.engine.blueprint import Blueprint, default_host_memory, plan
from offload.engine.checkpoints import Checkpoints
from offload.engine.connect import Opened, Parts, connect, engine_called, take_over
from offload.engine.loading_dict import StateDictLoading
from offload.engine.sealing import Sealer
from offload.errors import StateError
from offload.runtime.binding import let_go
from offload.runtime.hooks import Hooks, watch
from offload.store import lineage
from offload.store.format import UnitFlag
from offload.store.store import Store

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine


def begin_forward(engine: OffloadEngine) -> Hooks:
    """Put right what happened since the last call; returns the hooks that go on."""
    thaw(engine)
    engine_called(engine._parts)
    return engine._parts.hooks


def thaw(engine: OffloadEngine) -> None:
    """Make parameters that may be trained now trainable; raises StateError where that cannot be."""
    parts = engine._parts
    if engine.config.read_only or not torch.is_grad_enabled():
        return
    found = parts.ground.blueprint.found.parameters
    with torch._C.DisableTorchFunctionSubclass():
        frozen = {name for name, parameter in found.items() if not parameter.requires_grad}
    thawed = [name for name in found if name in parts.frozen and name not in frozen]
    if thawed:
        _check_groups(engine, thawed)
        stateless = set(thawed) - trained(parts)
        if stateless:
            _check_between_steps(parts, next(name for name in thawed if name in stateless))
            grow(engine, stateless)
        watch(engine._parts.hooks, {id(found[name]) for name in thawed})
    engine._parts.frozen.clear()
    engine._parts.frozen.update(frozen)


def trained(parts: Parts) -> set[str]:
    """Names of the parameters that have state."""
    units = parts.ground.blueprint.units
    return {slot.tensor.name for unit in units for slot in unit.slots if slot.tensor.trainable}


def _check_groups(engine: OffloadEngine, names: Collection[str]) -> None:
    found = engine._parts.ground.blueprint.found.parameters
    left = engine.optimizer.adopt([found[name] for name in names])
    if left:
        name = engine._parts.names_by_id[id(left[0])]
        raise StateError(
            f"parameter {name!r}: expected it in a parameter group, got requires_grad=True on one"
            " that is in none, and would never be trained. Call"
            " engine.optimizer.add_param_group({'params': [...]}) first, or make the engine with"
            " groups that hold it."
        )


def _check_between_steps(parts: Parts, name: str) -> None:
    parts.editor.check_closed(f"a forward after requires_grad_(True) of {name!r}")
    if parts.lent.has_gradients:
        raise StateError(
            f"parameter {name!r}: expected requires_grad_(True) between steps, got it between"
            " micro-steps, with gradients of others kept. Turn it on after step() or zero_grad()."
        )


def grow(engine: OffloadEngine, names: Collection[str]) -> None:
    """Give `names` state, zero, with masters that are what moved; drops gradients.

    Raises BudgetError or StoreError, with nothing changed, where there is no room.
    """
    parts = engine._parts
    ground, before = parts.ground, parts.ground.blueprint
    config = before.config
    if engine.config.host_memory is None:  # what is held now will be free
        held = ground.memory.slab.num_bytes // 2
        config = replace(config, host_memory=default_host_memory() + held)
    blueprint = plan(
        engine.module, config, before.rule, name=before.name, trained=trained(parts) | {*names}
    )
    standstill.stop(parts)
    ground.ledger.write_back.write()
    engine._checkpoints.saver.finish()
    store = _fill_successor(blueprint, ground.store)
    made = _exchange(engine, blueprint, store)
    made.counts.load_state_dict(parts.counts.state_dict())
    made.scale.load_state_dict(parts.scale.state_dict())
    made.stepper.max_norm = parts.stepper.max_norm
    made.hooks.last_micro_step = parts.hooks.last_micro_step


def _exchange(engine: OffloadEngine, blueprint: Blueprint, store: Store) -> Parts:
    """Let go of the engine's parts and of their store; make it new ones over `store`.

    If that fails the engine is closed, and `store` can be resumed.
    """
    parts = engine._parts
    ground, detached = parts.ground, engine._close.detach()
    assert detached is not None
    _, close, (_, *rest), _ = detached
    undo = contextlib.ExitStack()
    with undo:
        undo.push(ground.attached)
        undo.callback(store.close)
        ground.closing.close()
        lineage.discard_others(blueprint.config.nvme_path, blueprint.name, store.manifest.name)
        for bound in parts.residency.bound:
            let_go(bound)
        kept = Opened(store, ground.resumed, ground.metrics, ground.attached)
        made = connect(blueprint, parts.captures, {}, opened=kept)
        undo.pop_all()
    engine._parts, engine._checkpoints = made, Checkpoints(made)
    engine._close = weakref.finalize(engine, close, made, *rest)
    take_over(engine.module, made)
    StateDictLoading(engine.module, made)
    return made


def grow_for(engine: OffloadEngine, names: Collection[str]) -> None:
    """Make room for the states of `names`, which a checkpoint holds."""
    stateless = set(names) - trained(engine._parts)
    if stateless:
        grow(engine, stateless)


def _fill_successor(blueprint: Blueprint, store: Store) -> Store:
    """A store of the new layout at the generation of `store`."""
    paths, record = blueprint.config.nvme_path, store.committed
    assert record is not None
    made = create_store(blueprint, lineage.successor(paths, blueprint.name), fresh=True)
    try:
        source = Checkpoint(Path(store.folders[0]), store.manifest, record)
        loaded = regroup_into(made, source, store.folders)
        flags, sums, sealer = {}, {}, Sealer(made)
        for unit in blueprint.units:
            zero = unit.name in loaded.zero_moments
            flags[unit.name] = UnitFlag.MOMENTS_ZERO if zero else UnitFlag(0)
            side = loaded.sides[unit.name]
            sums[unit.name] = sealer.seal_written(unit.name, side, moments=not zero)
            if unit.num_elems > unit.trainable_elems:  # frozen tensors: on one side only yet
                flags[unit.name] |= UnitFlag.SPARE_STALE
        made.commit(
            sides=loaded.sides, generation=record.generation, payload=record.payload, flags=flags,
            checksums=sums,
        )  # fmt: skip
        made.generations.flush()
    except BaseException:
        made.remove()
        raise
    return made
