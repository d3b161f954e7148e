"""Checkpoints and weights, under DeepSpeed's names and with its arguments."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint.folder import LATEST_NAME, read_latest, write_latest
from offload.engine.exporting import save_weights
from offload.engine.facade import OffloadEngine
from offload.errors import StateError

_LOG = logging.getLogger(__name__)
_ZERO = "*zero_pp_rank_*_optim_states.pt"


class Saving:
    """Saves and loads; nothing is gathered in memory."""

    offload: OffloadEngine
    lr_scheduler: Any
    module: Any

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Save to `save_dir/tag` and wait until it is complete; True.

        `tag`: default global_step<n>.  `exclude_frozen_parameters` has no effect: frozen weights
        are links, which take no space.  `engine.offload.save_checkpoint` does not wait.
        """
        folder = Path(save_dir)
        before = read_latest(folder)
        name = None if tag is None else str(tag)
        self.offload.save_checkpoint(folder, name, dict(client_state or {})).wait()
        if not save_latest and before is not None:
            write_latest(folder, before)
        elif not save_latest:
            with contextlib.suppress(FileNotFoundError):
                (folder / LATEST_NAME).unlink()
        return True

    def load_checkpoint(
        self, load_dir: Any, tag: Any = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, *,
        load_module_only: bool = False, custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:  # fmt: skip
        """Go on from a checkpoint of this engine, or of DeepSpeed's ZeRO-3; folder, client state.

        (None, {}): there is none.  Raises StateError for loads in part.
        """
        if load_module_only or not load_optimizer_states or custom_load_fn is not None:
            raise StateError(
                "load_checkpoint: expected a load of weights and optimizer together, got one in"
                " part (load_module_only, load_optimizer_states=False or custom_load_fn). For the"
                " weights alone run `offload export` and load its folder before initialize."
            )
        folder, name = Path(load_dir), None if tag is None else str(tag)
        zero = folder / (name or read_latest(folder) or "")
        if any(zero.glob(_ZERO)):
            self.offload.load_deepspeed(folder, name)
            _LOG.warning("load_checkpoint: %s is DeepSpeed's: its client state is left out.", zero)
            return str(zero), {}
        scheduler = None if load_lr_scheduler_states else self.lr_scheduler
        kept = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else {}
        rates = [group["lr"] for group in self.offload.optimizer.param_groups]
        path, client_state = self.offload.load_checkpoint(folder, name)
        if scheduler is not None:
            scheduler.load_state_dict(kept)
            for group, lr in zip(self.offload.optimizer.param_groups, rates, strict=True):
                group["lr"] = lr
        return (None if path is None else str(path)), client_state

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write the weights, in the type that moves, to one file that replaces what is there.

        A name that ends in .safetensors is written in that format.  They stream from the store.
        """
        save_weights(
            self.offload, Path(save_dir) / save_filename, without_frozen=exclude_frozen_parameters
        )
        return True

    save_fp16_model = save_16bit_model  # its older name

    def module_state_dict(self) -> dict[str, Any]:
        """Full weights by name, mapped from files: nothing is gathered in memory."""
        state: dict[str, Any] = self.module.state_dict()
        return state

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
    ) -> None:  # fmt: skip
        """Replace weights by name; the optimizer's state stays.  StateError for `custom_load_fn`.

        `fetch_z3_params` has no effect: weights are found wherever they live.
        """
        if custom_load_fn is not None:
            raise StateError(
                "load_module_state_dict: expected no custom_load_fn, got one. Write to the weights"
                " in `with engine.offload.gathered(module):`."
            )
        self.module.load_state_dict(state_dict, strict=strict)
