"""Make a model that is larger than memory, with the values that plain construction gives.

    with offload.on_disk_init("/mnt/nvme"):
        model = Model(...)                      # each parameter moves to a file as it is registered
        model.apply(initialise)                 # works as ever, on the file's pages
    engine = OffloadEngine(model, nvme_path="/mnt/nvme", ...)

A parameter that something else still views (`w = torch.empty(...); self.w = Parameter(w)`) moves
once nothing does: it is looked at again when another is registered, when its module is, and when
the block ends.  The tensors stay ordinary ones, so nothing has to be gathered and every operation
gives its usual bits.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from offload.config import make_config
from offload.interchange.backing import BackingFile
from offload.memory.host import trim_heap

LEAST_BYTES = 64 << 10  # smaller parameters stay in memory
_MAX_WAITING = 16  # parameters looked at again whenever one is registered
_TRIM_BYTES = 32 << 20  # moved between two calls to return what was freed


@contextlib.contextmanager
def on_disk_init(
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
) -> Iterator[None]:
    """Put the parameters of modules made in the block into a file in `nvme_path` (its first).

    Values, random numbers drawn and ties are those of plain construction.  The file has no name:
    its space, 4 bytes a parameter in float32, is free again when an engine has taken the model
    over.  Convert with `torch.set_default_dtype` before, not with `model.to(dtype)` after: that
    makes new tensors, in memory.  One thread.  Raises StoreError where the disk is full.
    """
    folder = make_config({"nvme_path": nvme_path}).nvme_path[0]
    backing = BackingFile(Path(folder))
    mover = _Mover(backing)
    with contextlib.ExitStack() as stack:
        stack.callback(backing.close)
        for handle in (
            registration.register_module_parameter_registration_hook(mover.on_parameter),
            registration.register_module_module_registration_hook(mover.on_module),
        ):
            stack.callback(handle.remove)
        stack.enter_context(_deep_copies(mover))
        yield
        mover.finish()


class _Mover:
    """Moves parameters to the file, each once, as soon as only it refers to its data."""

    def __init__(self, backing: BackingFile) -> None:
        self._backing = backing
        self._seen: dict[int, weakref.ref[nn.Parameter]] = {}  # by id
        self._moved: dict[int, int] = {}  # id -> address in the file
        self._waiting: deque[weakref.ref[nn.Parameter]] = deque(maxlen=_MAX_WAITING)
        self._own_references = _references(torch.empty(1))  # to a storage that nothing else views
        self._freed_bytes = 0

    def on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        for reference in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            waiting = reference()
            if waiting is not None and not self.move(waiting):
                self._waiting.append(reference)
        if not self.move(parameter):
            self._waiting.append(weakref.ref(parameter))

    def on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """`child` is made: what its `__init__` held on to is gone."""
        if child is not None:
            for parameter in child._parameters.values():
                if parameter is not None:
                    self.move(parameter)

    def finish(self) -> None:
        """Move what could not be moved before, or was given new data."""
        for reference in list(self._seen.values()):
            parameter = reference()
            if parameter is not None:
                self.move(parameter)

    def move(self, parameter: nn.Parameter) -> bool:
        """Move it if that is possible; False: not now, since something else refers to its data."""
        key = id(parameter)
        if not self._is_known(parameter):
            self._seen[key] = weakref.ref(parameter)
            self._moved.pop(key, None)
        if not _is_for_file(parameter) or self._moved.get(key) == parameter.data_ptr():
            return True
        if _references(parameter) > self._own_references:
            return False
        flat = self._backing.empty(parameter.numel(), parameter.dtype)
        with torch.no_grad():
            target = flat.as_strided(parameter.shape, parameter.stride())
            target.copy_(parameter.data)
            parameter.data = target
        self._moved[key] = target.data_ptr()
        self._freed_bytes += target.nbytes
        if self._freed_bytes >= _TRIM_BYTES:
            self._freed_bytes = 0
            trim_heap()
        return True

    def _is_known(self, parameter: nn.Parameter) -> bool:
        reference = self._seen.get(id(parameter))
        return reference is not None and reference() is parameter


def _is_for_file(parameter: nn.Parameter) -> bool:
    """True for a large dense tensor in memory."""
    if type(parameter.data) is not torch.Tensor or parameter.device.type != "cpu":
        return False
    num_bytes = parameter.numel() * parameter.itemsize
    if num_bytes < LEAST_BYTES or parameter.layout is not torch.strided:
        return False
    return parameter.untyped_storage().nbytes() == num_bytes


def _references(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


@contextlib.contextmanager
def _deep_copies(mover: _Mover) -> Iterator[None]:
    """Copies of modules (`nn.TransformerEncoder` makes its layers so) are not registered one by
    one."""
    plain: Any = nn.Parameter.__deepcopy__

    def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = plain(parameter, memo)
        mover.move(copied)
        return copied

    kind: Any = nn.Parameter
    kind.__deepcopy__ = deepcopy
    try:
        yield
    finally:
        kind.__deepcopy__ = plain
