"""A small store of three units, and reading and writing its extents past the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from offload.partition.unit import Role
from offload.store import Store, UnitExtents

LAYOUT = {
    "dtype": "bfloat16",
    "units": [{"name": "embed", "shape": (61, 64)}, {"name": "model.layers.0@float32"}],
}
UNITS = [
    UnitExtents("embed", {Role.PARAM: 7808, Role.MASTER_LO: 7808, Role.EXP_AVG: 15616}),
    UnitExtents("model.layers.0@float32", {Role.PARAM: 5000, Role.EXP_AVG: 2 << 20}),
    UnitExtents("frozen", {Role.PARAM: 4096, Role.EXP_AVG: 0}),
]
NAMES = [unit.name for unit in UNITS]


class Bench:
    """Makes, opens and fills stores at fixed paths."""

    name = "demo"

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.folder = paths[0] / "offload-demo"

    def create(self, **options: Any) -> Store:
        return Store.create(self.paths, self.name, UNITS, **{"layout": LAYOUT, **options})

    def open(self, **options: Any) -> Store:
        return Store.open(self.paths, self.name, **{"layout": LAYOUT, **options})

    def trained(self, num_generations: int, **options: Any) -> Store:
        """A store whose generation g holds the byte g in each extent."""
        store = self.create(**options)
        for generation in range(num_generations):
            step(store, generation)
        return store


def step(store: Store, generation: int, **options: Any) -> None:
    store.begin()
    sides = {unit: store.spare(unit) for unit in NAMES}
    for unit, side in sides.items():
        fill(store, unit, side, generation)
    payload = f"state {generation}".encode()
    store.commit(**{"sides": sides, "payload": payload, "generation": generation, **options})


def fill(store: Store, unit: str, side: int, value: int) -> None:
    fd = os.open(store.files.path(unit, side), os.O_RDWR)
    for role in store.files.layout(unit).roles:
        extent = store.extent(unit, role, side)
        os.pwrite(fd, bytes([value]) * extent.num_bytes, extent.offset)
    os.close(fd)


def content(store: Store, unit: str, side: int | None = None) -> set[int]:
    """The distinct bytes in a unit's extents, on its committed side unless told."""
    if side is None:
        assert store.committed is not None
        side = store.committed.sides[unit]
    found: set[int] = set()
    with open(store.files.path(unit, side), "rb") as file:
        for role in store.files.layout(unit).roles:
            extent = store.extent(unit, role, side)
            file.seek(extent.offset)
            found |= set(file.read(extent.num_bytes))
    return found


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
