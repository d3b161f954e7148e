"""The device behind one small interface, so that a machine without a GPU runs the same code.

fill:  host slot (16-bit halves) --convert--> slice of a unit's flat storage
take:  gradient on the device    --round----> host tensor
"""

from __future__ import annotations

from typing import Protocol

import torch

from offload import kernels


class Device(Protocol):
    """What the runtime asks of a device."""

    def fill(self, dst: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor | None) -> None:
        """Write weights into `dst` (n,) from bf16 `hi` (n,) and, for exact fp32, int16 `lo` (n,).

        HOST memory may be reused when this returns.
        """
        ...

    def to_host(self, grad: torch.Tensor) -> torch.Tensor:
        """A contiguous (n,) HOST view or copy of a gradient."""
        ...


class CpuDevice:
    """DEVICE memory is ordinary memory: fills convert on `threads`, gradients are read in place."""

    def __init__(self, threads: kernels.Threads | None = None) -> None:
        self._threads = threads

    def fill(self, dst: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor | None) -> None:
        if lo is None:
            kernels.convert(hi, dst, threads=self._threads)
        else:
            kernels.join(hi, lo, dst, threads=self._threads)

    def to_host(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.detach().contiguous().view(-1)


class CudaDevice:
    """Copies on the current stream; the host waits for each, so a slot may be reused at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fill(self, dst: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor | None) -> None:
        with torch.no_grad():
            if lo is None:
                dst.copy_(hi, non_blocking=True)
            else:
                # bits = (hi << 16) + sign_extend(lo): the addition carries, so it is done in int32
                high = hi.to(self._device, non_blocking=True).view(torch.int16).to(torch.int32)
                bits = (high << 16) + lo.to(self._device, non_blocking=True).to(torch.int32)
                dst.copy_(bits.view(torch.float32))
        torch.cuda.current_stream(self._device).synchronize()

    def to_host(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.detach().contiguous().view(-1).cpu()


def make_device(device: torch.device, threads: kernels.Threads | None) -> Device:
    """The implementation for `device`."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice(threads)
