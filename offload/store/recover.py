"""Open a store that exists: which one it is, whether it fits, which generation counts.

    MANIFEST -> same layout? -> PART of each folder -> newest valid record -> was it flushed?

Nothing here writes, so a refused store stays as it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.errors import StoreCorrupt, StoreError
from offload.store import checksum
from offload.store.commits import CommitLog
from offload.store.files import DataFiles
from offload.store.folder import MANIFEST_NAME, Found, check_half_made
from offload.store.format import Manifest, Record, decode_manifest
from offload.store.lock import boot_id

_LOG = logging.getLogger(__name__)
_MAX_DIFFERENCES = 4
_ANEW = "(resume=False, offload-train --fresh)"


def read_manifest(
    found: Found, name: str, layout: Mapping[str, Any] | None = None
) -> Manifest:  # fmt: skip
    """Return the manifest; raises StoreError, which tells of other stores there, without one."""
    if found.manifest is None:
        check_half_made(found)
        where = ", ".join(str(folder) for folder in found.folders)
        raise StoreError(
            f"store {name!r}: expected a store at {where}, got none. {_others(found, layout)}"
            "Check the paths and the name, or start without resuming."
        )
    return decode_manifest(found.manifest.read_bytes(), str(found.manifest))


def _others(found: Found, layout: Mapping[str, Any] | None) -> str:
    """Tell of a store of another name at the same paths, and how it differs from `layout`."""
    for path in dict.fromkeys(folder.parent for folder in found.folders):
        for place in sorted(path.glob(f"offload-*/{MANIFEST_NAME}")):
            with contextlib.suppress(StoreError, OSError):
                other = decode_manifest(place.read_bytes(), str(place))
                listed = list(differences(plain(layout), other.layout)) if layout else []
                made = f", made for another model or other settings: {cut(listed)}"
                return f"There is {other.name!r}{made if listed else ''}. "
    return ""


def cut(listed: list[str]) -> str:
    """The first differences of many."""
    more = f" and {len(listed) - _MAX_DIFFERENCES} more" if len(listed) > _MAX_DIFFERENCES else ""
    return f"{'; '.join(listed[:_MAX_DIFFERENCES])}{more}"


def order_folders(found: Found, manifest: Manifest) -> tuple[Path, ...]:
    """Return the store's folders by their number, whatever the order of the given paths."""
    by_index = {
        part.index: folder
        for folder, part in zip(found.folders, found.parts, strict=True)
        if part is not None and part.store_id == manifest.store_id
    }
    missing = sorted(set(range(manifest.num_paths)) - set(by_index))
    if missing:
        known = [part for part in found.parts if part and part.store_id == manifest.store_id]
        place = known[0].place_of(missing[0]) if known else ""
        raise StoreError(
            f"store {manifest.name!r}: expected {manifest.num_paths} folders, got "
            f"{len(by_index)}: number {missing[0] + 1}{place} is not at the "
            "given paths. "
            "Give all paths of the store, and check that each drive is mounted."
        )
    return tuple(by_index[index] for index in range(manifest.num_paths))


def plain(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description as JSON gives it back, so that tuples equal lists."""
    value: dict[str, Any] = json.loads(json.dumps(layout))
    return value


def check_layout(manifest: Manifest, layout: Mapping[str, Any]) -> None:
    """Raise with the first differences unless the store was made for this layout."""
    found = list(differences(plain(layout), manifest.layout))
    if not found:
        return
    raise StoreError(
        f"store {manifest.name!r} was made for another model or other settings: {cut(found)}. "
        f"Use the settings it was made with, another name, or discard it {_ANEW}."
    )


def differences(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """Compare two JSON values; name each place where they differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in dict.fromkeys([*expected, *got]):
            inner = f"{where}.{key}" if where else str(key)
            if key in expected and key in got:
                yield from differences(expected[key], got[key], inner)
            else:
                sides = [_short(value.get(key, "nothing")) for value in (expected, got)]
                yield f"{inner}: expected {sides[0]}, got {sides[1]}"
    elif _is_named(expected) and _is_named(got):
        yield from differences(_by_name(expected), _by_name(got), where)
    elif expected != got:
        yield f"{where or 'layout'}: expected {_short(expected)}, got {_short(got)}"


def _is_named(value: Any) -> bool:
    """True for a list of objects that each have a name: compared by name, not by position."""
    if not isinstance(value, list) or not value:
        return False
    names = [item.get("name") for item in value if isinstance(item, dict)]
    return len(names) == len(value) == len({str(name) for name in names}) and None not in names


def _by_name(values: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{value['name']}": {**value, "position": i} for i, value in enumerate(values)}


def _short(value: Any) -> str:
    text = value if value == "nothing" else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def newest_record(log: CommitLog, manifest: Manifest) -> Record:
    """Return the generation that counts, or raise saying why there is none."""
    record, problems = log.read()
    if record is not None:
        for problem in problems:
            _LOG.warning("%s Going on with generation %d.", problem, record.generation)
        return record
    what = f"store {manifest.name!r} holds no valid generation"
    if problems:
        raise StoreCorrupt(
            f"{what}: {' '.join(problems)} Restore a checkpoint, or discard it {_ANEW}."
        )
    raise StoreError(
        f"{what}: the job that made it ended before its first commit, or ran with "
        f'durability="none" and was killed. Start anew {_ANEW}.'
    )


def has_restarted(record: Record) -> bool:
    """True when the machine has restarted since: what no flush covers may be lost."""
    return record.boot_id != boot_id()


def lost_by_power(record: Record) -> bool:
    """True when data of this record may never have reached the drive."""
    return not record.flushed and has_restarted(record)


def check_survived(files: DataFiles, record: Record, manifest: Manifest) -> None:
    """Verify what no flush covered before the machine restarted; refuse it if it is not whole."""
    what = (
        f"store {manifest.name!r}: generation {record.generation} was written with "
        f'durability="{record.durability}", not flushed, and the machine has restarted since: '
    )
    advice = f'Restore a checkpoint, or start anew {_ANEW}; durability="step" prevents this.'
    if not all(checksum.is_sealed(record, unit) for unit in record.sides):
        raise StoreError(
            f"{what}parts of it may be lost, and it has no checksums to tell. {advice} "
            "Or open it unverified, if the machine was shut down in good order."
        )
    for unit in record.sides:
        for problem in checksum.damage(files, record, unit):
            raise StoreCorrupt(f"{what}{problem}. {advice}")
