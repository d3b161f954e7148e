"""The device behind one small interface, so that a machine without a GPU runs the same code.

    fill   host slot (16-bit halves) --convert--> slice of a unit's flat storage
    copy_out   gradients on the device   -------> host slots

On a GPU a fill runs on a stream of its own: behind the point at which compute had left the
storage's memory, and in front of what compute is given from now on.  The slot is busy until then.
Gradients leave on another one, behind what made them (landing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from offload import kernels
from offload.runtime.streams import CudaStreams, Event, Lane, Streams


class Device(Protocol):
    """What the runtime asks of a device."""

    @property
    def staged(self) -> bool:
        """True where HOST memory could not be made fit for copies that do not block."""
        ...

    @property
    def beside_compute(self) -> bool:
        """True where copies run beside what compute was given."""
        ...

    def mark(self) -> Event | None:
        """A point behind all that compute was given so far; None: it has run."""
        ...

    def fill(
        self, dst: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor | None, *,
        behind: Event | None = None,
    ) -> Event | None:  # fmt: skip
        """Write weights into `dst` (n,) from bf16 `hi` (n,) and, for exact fp32, int16 `lo` (n,).

        `behind`: when the memory of `dst` is nobody else's; None: behind what compute was given.
        HOST memory may be reused when the event has passed; None: when this returns.
        """
        ...

    def register(self, address: int, num_bytes: int) -> Callable[[], None]:
        """HOST memory that copies read and write; call the result before it is freed."""
        ...


class CpuDevice:
    """DEVICE memory is ordinary memory: fills convert on `threads`."""

    staged = False
    beside_compute = False

    def __init__(self, threads: kernels.Threads | None = None) -> None:
        self._threads = threads

    def mark(self) -> None:
        return None

    def fill(
        self, dst: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor | None, *,
        behind: Event | None = None,
    ) -> None:  # fmt: skip
        if lo is None:
            kernels.convert(hi, dst, threads=self._threads)
        else:
            kernels.join(hi, lo, dst, threads=self._threads)

    def register(self, address: int, num_bytes: int) -> Callable[[], None]:
        return lambda: None


class StreamDevice:
    """Copies on their own streams, ordered with compute by events."""

    beside_compute = True

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.staged = False

    def mark(self) -> Event:
        return self._streams.record(Lane.COMPUTE)

    def fill(
        self, dst: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor | None, *,
        behind: Event | None = None,
    ) -> Event:  # fmt: skip
        streams = self._streams
        # The storage may be memory that kernels given earlier still use under its former name.
        streams.wait(Lane.IN, behind if behind is not None else self.mark())
        streams.run(Lane.IN, lambda: _copy_in(dst, hi, lo))
        copied = streams.record(Lane.IN)
        # So compute reads whole weights, and whoever frees the storage frees it behind the copy.
        streams.wait(Lane.COMPUTE, copied)
        return copied

    def copy_out(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, behind: Event
    ) -> Event:  # fmt: skip
        """Copy (n,) of DEVICE into (n,) HOST of the same type, for each pair (HOST, DEVICE).

        `behind`: when compute has made them.  Both sides stay as they are until the event has
        passed: it is the caller who keeps their memory alive.
        """
        streams = self._streams
        streams.wait(Lane.OUT, behind)
        streams.run(Lane.OUT, lambda: _copy_out(pairs))
        return streams.record(Lane.OUT)

    def register(self, address: int, num_bytes: int) -> Callable[[], None]:
        done = self._streams.register(address, num_bytes)
        if done is None:
            self.staged = True
            return lambda: None
        return done


def _copy_in(dst: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor | None) -> None:
    if lo is None:
        dst.copy_(hi, non_blocking=True)
        return
    # bits = (hi << 16) + sign_extend(lo): the addition carries, so it is done in int32
    high = hi.to(dst.device, non_blocking=True).view(torch.int16).to(torch.int32)
    bits = (high << 16) + lo.to(dst.device, non_blocking=True).to(torch.int32)
    dst.copy_(bits.view(torch.float32))


def _copy_out(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for host, flat in pairs:
        host.copy_(flat, non_blocking=True)


def make_device(device: torch.device, threads: kernels.Threads | None) -> Device:
    """The implementation for `device`."""
    return StreamDevice(CudaStreams(device)) if device.type == "cuda" else CpuDevice(threads)
