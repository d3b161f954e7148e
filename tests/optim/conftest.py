from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from stored_unit import ON_DISK, StoredUnit, make_unit

import aio
from offload.optim.pipeline import UpdatePipeline
from offload.partition.states import FP32_MOMENTS, StateTable


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> Iterator[aio.Queue]:
    """The default backend, or the one that the test names."""
    try:
        queue = aio.Queue(getattr(request, "param", "auto"), read_depth=64, write_depth=64)
    except OSError as error:
        pytest.skip(str(error))
    with queue:
        yield queue


OpenPipeline = Callable[..., UpdatePipeline]


@pytest.fixture
def open_pipeline(queue: aio.Queue) -> Iterator[OpenPipeline]:
    """Open pipelines with own slots; all are closed before the queue."""
    with contextlib.ExitStack() as stack:

        def open_one(
            *,
            num_slots: int = 3,
            chunk_elems: int = 2048,
            grad_elem_bytes: int = 4,
            states: StateTable = FP32_MOMENTS,
            num_threads: int = 1,
            **limits: int,
        ) -> UpdatePipeline:
            slot_bytes = states.slot_bytes(chunk_elems, grad_elem_bytes)
            return stack.enter_context(
                UpdatePipeline(
                    queue,
                    memoryview(aio.Buffer(num_slots * slot_bytes).view),
                    num_slots=num_slots,
                    slot_bytes=slot_bytes,
                    num_threads=num_threads,
                    **limits,
                )
            )

        yield open_one


@pytest.fixture
def store_unit(tmp_path: Path) -> Iterator[Callable[..., StoredUnit]]:
    with contextlib.ExitStack() as stack:

        def store(
            name: str = "block",
            sizes: tuple[int, ...] = (3000, 1, 4097, 700),
            placement: Mapping[object, str] = ON_DISK,
            states: StateTable = FP32_MOMENTS,
            **settings: object,
        ) -> StoredUnit:
            unit = make_unit(name, list(sizes), frozen=100, states=states)
            stored = StoredUnit(unit, tmp_path, {**ON_DISK, **placement}, **settings)
            stack.callback(stored.close)
            return stored

        yield store
