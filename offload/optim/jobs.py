"""What the engine asks of an update: the pipeline in C and the one for torch classes give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import aio
from offload.optim.pipeline import UnitTimes, UpdateStats
from offload.partition.unit import Role


class Job(Protocol):
    """The ticket of one submission; any thread.  `unit` None: all of the job."""

    @property
    def closed(self) -> bool: ...

    @property
    def stats(self) -> UpdateStats: ...

    def release(self, unit: int | None = None) -> None: ...

    def wait(
        self, unit: int | None = None, timeout: float | None = None, *, made: bool = False
    ) -> None: ...

    def done(self, unit: int | None = None) -> bool: ...

    def cancel(self) -> None: ...

    def times(self) -> list[UnitTimes]: ...

    def checksums(self, unit: int) -> dict[Role, NDArray[np.uint64]]: ...

    def close(self) -> None: ...


class Pipeline(Protocol):
    """Takes jobs; see `UpdatePipeline.submit`."""

    def submit(
        self,
        chunks: NDArray[np.void],
        segments: NDArray[np.void],
        rows: NDArray[Any],
        released: NDArray[np.uint8],
        *,
        unit_names: Sequence[str],
        keep_alive: Sequence[Sequence[aio.File]],
        checksums: bool = False,
        timed: bool = False,
    ) -> Job: ...

    def close(self) -> None: ...
