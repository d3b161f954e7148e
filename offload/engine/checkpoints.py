"""`save_checkpoint` and `load_checkpoint`: the engine's state, at moments at which it is still.

save    capture everything as it is now; the pending step, which ends by itself, goes to the saver
load    nothing in flight; data into the spare sides; commit; then the state outside the store
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint import folder
from offload.checkpoint.load import Checkpoint, check_layout, copy_into, open_checkpoint
from offload.checkpoint.regroup import (
    is_regrouped,
    regroup_into,
    trained_in,
    with_trained,
)
from offload.checkpoint.save import Content, Saver, Saving
from offload.engine import standstill
from offload.engine.blueprint import describe_layout
from offload.engine.connect import Parts
from offload.engine.generation import decode, encode
from offload.engine.rewriting import commit_rewritten
from offload.errors import ConfigError, StateError
from offload.store.recover import plain

_CLIENT = "client_state"


class Checkpoints:
    """Saves and loads checkpoints of one engine; called from its thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        ground = parts.ground
        self.saver = Saver(
            ground.store,
            backend=ground.queue.backend,
            written=frozenset(unit.name for unit in ground.blueprint.units if unit.trainable_elems),
        )

        ground.closing.callback(self.saver.finish)  # before the store is closed

    def save(
        self, directory: Path, tag: str, state: Mapping[str, Any], *,
        client_state: Mapping[str, Any] | None, keep: int | None,
    ) -> Saving:  # fmt: skip
        """Save the generation of the last step with `state`, which replaces what it recorded.

        The step's writes may be under way; what went wrong with them so far is raised.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"keep: expected at least 1 checkpoint, got {keep}.")
        tag = folder.check_tag(tag)
        payload = encode({**state, _CLIENT: dict(client_state or {})})
        _check_plain(payload)
        ledger = self._parts.ground.ledger
        record = ledger.committing()
        sides = {unit.name: ledger.sides[index] for index, unit in ledger.units.items()}
        content = Content(payload, state["global_step"], ledger.generation, sides, record)
        return self.saver.save(directory, tag, content, keep=keep)

    def trained(
        self, directory: Path, tag: str | None, *, check: Callable[[Mapping[str, Any]], None]
    ) -> set[str]:
        """Names of the parameters that have state in a checkpoint; none where there is none.

        Where it cannot be loaded even with room for them: StoreError, or what `check(state)`
        raises.
        """
        self.saver.finish()
        found = folder.find(directory, tag)
        if found is None:
            return set()
        checkpoint = open_checkpoint(found)
        blueprint = self._parts.ground.blueprint
        layout = plain(describe_layout(blueprint))
        names = trained_in(checkpoint.manifest.layout) & blueprint.found.parameters.keys()
        if not is_regrouped(with_trained(layout, names), checkpoint.manifest.layout):
            check_layout(checkpoint, layout)
        check(decode(checkpoint.record.payload))
        return names

    def load(
        self, directory: Path, tag: str | None
    ) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
        """Make a checkpoint the current generation; return its folder, state and client state.

        trained() has checked it, and there is room.  None: there is no checkpoint.
        """
        self.saver.finish()
        found = folder.find(directory, tag)
        if found is None:
            return None
        checkpoint = open_checkpoint(found)
        layout = plain(describe_layout(self._parts.ground.blueprint))
        if not is_regrouped(layout, checkpoint.manifest.layout):
            check_layout(checkpoint, layout)
        state = decode(checkpoint.record.payload)
        client_state = state.pop(_CLIENT, {})
        self._replace(checkpoint, encode(state))
        return found.path, state, client_state

    def _replace(self, checkpoint: Checkpoint, payload: bytes) -> None:
        """Stop everything, copy, commit, and give the device the small tensors."""
        ground = self._parts.ground
        standstill.stop(self._parts)
        if checkpoint.manifest.layout == ground.store.manifest.layout:
            loaded = copy_into(ground.store, checkpoint, backend=ground.queue.backend)
        else:
            loaded = regroup_into(ground.store, checkpoint)
        zero = [u.index for u in ground.blueprint.units if u.name in loaded.zero_moments]
        commit_rewritten(
            ground.ledger, loaded.sides, payload, zero_moments=zero, checksums=loaded.checksums
        )
        standstill.refresh(self._parts)


def _check_plain(payload: bytes) -> None:
    """Refuse at save time what could not be read back without running code."""
    try:
        decode(payload)
    except Exception as error:
        raise StateError(
            "checkpoint: expected client_state and tracked objects of plain values (numbers, text,"
            " lists, dicts, tensors), got something that needs code to be read back"
            f" ({str(error).splitlines()[0]}). Save its state_dict instead."
        ) from error
