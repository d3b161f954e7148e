"""`offload.zero`: ZeRO-3's two contexts.

with zero.Init(config_dict_or_path=config):     parameters go to disk as they are made
    model = Model(...)
with zero.GatheredParameters(model.head.weight, modifier_rank=0):
    model.head.weight.fill_(0)                  readable and editable wherever they live
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.deepspeed_config.recipe import recipe_of
from offload.engine.facade import OffloadEngine
from offload.engine.outer_loop import holds
from offload.interchange.on_disk import on_disk_init

_LOG = logging.getLogger(__name__)
# Parameters carry no attribute of ours, and GatheredParameters is given nothing else: the engines
# that initialize() made are looked through.  Weak, so that none lives longer for it.
_ENGINES: weakref.WeakSet[OffloadEngine] = weakref.WeakSet()


def register(engine: OffloadEngine) -> None:
    """Let GatheredParameters find the parameters of `engine`."""
    _ENGINES.add(engine)


@contextlib.contextmanager
def Init(
    module: nn.Module | None = None, *, config_dict_or_path: Any = None, config: Any = None,
    enabled: bool = True, **others: Any,
) -> Iterator[None]:  # fmt: skip
    """Put parameters made in the block into a file on the drive that the configuration names.

    Without a drive they stay in memory until initialize() takes them over, and that is told.
    `module`, and arguments that steer partitioning, have no effect: the values are those of plain
    construction in every case.
    """
    source = config_dict_or_path if config_dict_or_path is not None else config
    paths = os.environ.get("OFFLOAD_NVME", "").split(os.pathsep)
    if not paths[0] and source is not None:
        paths = recipe_of(source).settings.get("nvme_path", [""])
    if not enabled:
        yield
    elif not paths[0]:
        _LOG.warning("zero.Init: no drive is named, so the model is made in memory.")
        yield
    else:
        with on_disk_init(paths[0]):
            yield


@contextlib.contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Hold `params`, a parameter or any nesting of them, readable and editable in the block.

    Edits are kept whatever `modifier_rank` says.  Parameters that no engine holds are plain.
    """
    with contextlib.ExitStack() as stack:
        wanted = {id(each): each for each in _flat(params)} if enabled else {}
        for engine in list(_ENGINES):
            own = [each for key, each in wanted.items() if holds(engine, each)]
            if own:
                stack.enter_context(engine.gathered(own))
        yield


def _flat(params: Any) -> Iterator[nn.Parameter]:
    if isinstance(params, torch.Tensor):
        if isinstance(params, nn.Parameter):
            yield params
    elif isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, Iterable):
        for each in params:
            yield from _flat(each)
