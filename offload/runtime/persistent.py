"""Small tensors: weights stay on the device, state in host memory (DESIGN M5).

    region  [ param | master_lo or master | states | scales | grad ]   HOST, roles padded to 4096
    flat    compute_dtype, DEVICE, refreshed from `param` after each update

They form one unit that is updated and written like any other, but never read after the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

import aio
from offload.masters import dtype_of
from offload.memory.slab import Region
from offload.partition.chunk import Chunk
from offload.partition.states import MOMENTS
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up
from offload.runtime.binding import BoundUnit
from offload.runtime.device import Device
from offload.runtime.initial import encode_chunk


class _Place(Protocol):
    @property
    def file(self) -> aio.File: ...
    @property
    def offset(self) -> int: ...


class PersistentState:
    """Host state of the small tensors."""

    def __init__(self, bound: BoundUnit, region: Region, *, grad_bytes: int) -> None:
        self.bound = bound
        self.unit: Unit = bound.unit
        self._outdated = False  # the device has the weights of an earlier generation
        self._read_again: Callable[[], None] | None = None  # what memory holds is void
        self._weights = bound.unit.states.weights
        self._regions: dict[Role, Region] = {}
        start = 0
        for role in self.unit.roles:
            num_bytes = self.unit.role_bytes(role)
            if role in self._weights.roles:  # of frozen tensors too
                num_bytes = self.unit.num_elems * self._weights.elem_bytes(role)
            size = round_up(num_bytes, STORE_ALIGN_BYTES)
            self._regions[role] = region.part(start, size)
            start += size
        self.grad = region.part(
            start, round_up(self.unit.trainable_elems * grad_bytes, STORE_ALIGN_BYTES)
        )

    def region(self, role: Role) -> Region:
        return self._regions[role]

    def tensor(self, role: Role) -> torch.Tensor:
        """The flat buffer of the weights or masters; shares memory."""
        self._recover()
        return self._regions[role].tensor(dtype_of(self._weights, role), self.unit.num_elems)

    def data(self, role: Role) -> torch.Tensor:
        """The bytes of a role that the store has too; shares memory."""
        self._recover()
        return self._regions[role].tensor(torch.uint8, self.unit.role_bytes(role))

    def lose(self, read_again: Callable[[], None]) -> None:
        """Memory holds a step that is lost: `read_again()` mends that before its next use."""
        self._read_again = read_again
        self._outdated = True

    def _recover(self) -> None:
        read_again, self._read_again = self._read_again, None
        if read_again is None:
            return
        try:
            read_again()
        except BaseException:
            self._read_again = read_again
            raise

    def forget_moments(self) -> None:
        """Make every state zero."""
        for role in self.unit.roles:
            if role in MOMENTS:
                self.data(role).zero_()

    def initialise(self) -> None:
        """Take the masters from the live parameters; moments are zero."""
        live = (p.detach().reshape(-1) for p in self.bound.parameters if p.numel())
        whole = Chunk(0, 0, self.unit.num_elems)
        encode_chunk(self.unit, whole, live, {r: self.tensor(r) for r in self._weights.roles})
        self.forget_moments()

    def transfer(
        self, move: Callable[[aio.File, memoryview, int], aio.Ticket],
        place: Callable[[Role], _Place], *, moments: bool,
    ) -> int:  # fmt: skip
        """Read or write the roles whole, and wait; returns bytes."""
        tickets, num_bytes = [], 0
        for role in self.unit.roles:
            size = round_up(self.unit.role_bytes(role), STORE_ALIGN_BYTES)
            if not size or (not moments and role in MOMENTS):
                continue
            at = place(role)
            tickets.append(move(at.file, self._regions[role].part(0, size).view, at.offset))
            num_bytes += size
        for ticket in tickets:
            ticket.wait()
        return num_bytes

    def outdate(self) -> None:
        """An update has been submitted: the device needs its weights before their next use."""
        self._outdated = True

    def catch_up(self, device: Device, wait: Callable[[int], None]) -> None:
        """Refresh if there was an update; `wait(unit)` returns when its kernels have ended."""
        if self._outdated:
            wait(self.unit.index)
            self.refresh(device)

    def refresh(self, device: Device) -> None:
        """Give the device the current weights."""
        lo = self.tensor(Role.MASTER_LO) if self._weights.exact else None
        copied = device.fill(self.bound.flat, self.tensor(Role.PARAM), lo)
        if copied is not None:
            copied.wait()  # an update may change the masters at any time
        self._outdated = False
