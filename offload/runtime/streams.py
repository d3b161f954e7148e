"""Streams of an accelerator behind one small interface, so that their order is tested without one.

    compute   the caller's stream: forward, backward, and the making of storages
    in, out   copies to and from HOST memory, one after the other each

    event = record(stream)      a point in what was given to the stream so far
    wait(stream, event)         what is given to the stream from now on comes after it

Work given to one stream runs in order, work of two streams in any order but for events.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable
from typing import Protocol

import torch

_LOG = logging.getLogger(__name__)


class Lane(enum.Enum):
    """Which stream."""

    COMPUTE = "compute"
    IN = "in"
    OUT = "out"


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """True when the stream has passed it; never waits."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the stream has passed it."""
        ...


class Streams(Protocol):
    """What copies ask of an accelerator."""

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Give `work`, which must not block, to a stream."""
        ...

    def record(self, lane: Lane) -> Event: ...
    def wait(self, lane: Lane, event: Event) -> None: ...
    def register(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Make HOST memory fit for copies that do not block; call the result before it is freed.

        None: that failed, copies are staged.
        """
        ...


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.native = event

    def done(self) -> bool:
        return bool(self.native.query())

    def wait(self) -> None:
        self.native.synchronize()


class CudaStreams:
    """Two streams for copies beside whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = {lane: torch.cuda.Stream(device) for lane in (Lane.IN, Lane.OUT)}

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        with torch.no_grad(), torch.cuda.stream(self._of(lane)):
            work()

    def record(self, lane: Lane) -> _CudaEvent:
        event = torch.cuda.Event(blocking=True)  # whoever waits leaves its processor to updates
        event.record(self._of(lane))
        return _CudaEvent(event)

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._of(lane).wait_event(event.native)

    def register(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        runtime = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(address, num_bytes, 1))
        if failed:  # copies are then staged by the driver: slower, and as right
            _forget_error(self._device)
            _LOG.warning(
                "device: %s bytes of host memory cannot be pinned (cudaHostRegister gives error"
                " %d): copies are slower. Raise the limit on locked memory (ulimit -l).",
                f"{num_bytes:,}", failed,
            )  # fmt: skip
            return None

        def unregister() -> None:
            with contextlib.suppress(RuntimeError):  # the context may be gone at exit
                runtime.cudaHostUnregister(address)

        return unregister

    def _of(self, lane: Lane) -> torch.cuda.Stream:
        return self._own.get(lane) or torch.cuda.current_stream(self._device)


def _forget_error(device: torch.device) -> None:
    """A call that has failed leaves its error behind, and torch's next kernel would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
