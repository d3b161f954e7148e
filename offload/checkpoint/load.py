"""Load a checkpoint into a store: as its next generation, all of it or nothing.

    note, manifest, record -> same model? -> begin -> copy each unit to its spare side -> (commit)

The commit is the caller's.  Until it is made, the generation that counts is the one before; a
damaged checkpoint is refused with the unit and the role, and changes nothing (two sides).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

import aio
from offload.checkpoint.folder import Found
from offload.checkpoint.stream import ALONE, CopyJob, copy, data_bytes
from offload.errors import OffloadError, StoreCorrupt, StoreError
from offload.store import checksum, durable, files, recover
from offload.store.commits import CommitLog
from offload.store.folder import MANIFEST_NAME
from offload.store.format import Manifest, Record, UnitFlag, decode_manifest
from offload.store.store import Store


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole, its data not yet read."""

    path: Path
    manifest: Manifest
    record: Record


@dataclass(frozen=True)
class Loaded:
    """What a commit says of units that were copied."""

    sides: Mapping[str, int]
    zero_moments: frozenset[str]  # units
    checksums: Mapping[str, int] | None = field(repr=False)  # None: the units are not sealed yet


def open_checkpoint(found: Found) -> Checkpoint:
    """Read and check all but the data; raises StoreCorrupt or StoreError (another version)."""
    where = found.path / MANIFEST_NAME
    with told(found.path):
        manifest = decode_manifest(where.read_bytes(), str(where))
        with contextlib.closing(CommitLog(found.path, manifest, read_only=True)) as log:
            record, problems = log.read()
        if record is None:
            raise StoreCorrupt(
                f"checkpoint {found.path}: holds no valid record: {' '.join(problems)} "
                "Load another one."
            )
        data = files.DataFiles((found.path,), manifest, read_only=True)
        for layout in manifest.files:
            side = record.sides[layout.unit]
            files.check_file(data.path(layout.unit, side), manifest, layout, side)
    return Checkpoint(found.path, manifest, record)


def check_layout(checkpoint: Checkpoint, layout: Mapping[str, Any]) -> None:
    """Raise StoreError with the differences unless the checkpoint was made for this layout."""
    listed = list(recover.differences(recover.plain(layout), checkpoint.manifest.layout))
    if listed:
        raise StoreError(
            f"checkpoint {checkpoint.path} was saved from another model or other settings: "
            f"{recover.cut(listed)}. Build the engine as it was built for the checkpoint."
        )


def copy_into(store: Store, checkpoint: Checkpoint, *, backend: str) -> Loaded:
    """Copy every unit to its spare side; blocks.  The layouts must be equal."""
    store.begin()
    record = checkpoint.record
    data = files.DataFiles((checkpoint.path,), checkpoint.manifest, read_only=True)
    sides = {unit: store.spare(unit) for unit in record.sides}
    sums: dict[str, int] = {}

    def seal(job: CopyJob) -> None:
        unit = job.layout.unit
        sums[unit] = checksum.seal(store.files, unit, sides[unit], job.sums)

    with told(checkpoint.path):
        jobs = [_job(store, checkpoint, data, layout.unit) for layout in checkpoint.manifest.files]
        with progress_bar(checkpoint) as bar:
            copy(
                jobs, backend=backend, depth=ALONE, finished=seal,
                progress=lambda num_bytes: bar.update(num_bytes) and None,
            )  # fmt: skip
    zero = (unit for unit, flag in record.flags.items() if UnitFlag.MOMENTS_ZERO in flag)
    return Loaded(sides, frozenset(zero), sums)


def _job(store: Store, checkpoint: Checkpoint, data: files.DataFiles, unit: str) -> CopyJob:
    record, layout = checkpoint.record, data.layout(unit)
    source = data.path(unit, record.sides[unit])
    expected = None
    if checksum.is_sealed(record, unit):
        expected = checksum.read_sums(source, layout, record.checksums[unit])
    target = store.files.path(unit, store.spare(unit))
    roles = checksum.compared_roles(layout, record.flags[unit])
    return CopyJob(layout, record.sides[unit], source, target, roles, expected)


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a checkpoint into one line that names it."""
    what = f"checkpoint {path} cannot be loaded"
    try:
        yield
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{what}: {error} Load another one.") from error
    except OffloadError:
        raise
    except aio.IOFailed as error:
        raise StoreError(f"{what}: {error}") from error
    except OSError as error:
        raise StoreError(durable.explain(error, what)) from error


def progress_bar(checkpoint: Checkpoint) -> Any:
    """A progress bar with rate and time left, where stderr is a terminal."""
    total = data_bytes(checkpoint.manifest.files)
    name = f"loading {checkpoint.path.name}"
    return tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=None, leave=False)
