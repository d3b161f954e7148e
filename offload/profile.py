"""A drive's profile: what `offload-bench io` found out, for engines on that drive.

    offload-bench io DIR  ->  DIR/offload.profile.json  ->  OffloadEngine(nvme_path=DIR)

An engine finds the file in its path by itself; one that is named (`profile=`) is taken as it is.
Block size, depths and backend of its queue come from it, and how bytes are spread over drives.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

FILE_NAME = "offload.profile.json"  # no store's folder has a name like this
VERSION = 1
BACKENDS = ("uring", "libaio", "threads")
MAX_DEPTH = 1024
MAX_FILE_BYTES = 1 << 20
_KIND = "offload-profile"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A drive as it was measured."""

    path: str  # the folder that was measured
    date: str  # ISO 8601
    backend: str
    block_bytes: int
    read_depth: int  # blocks in flight
    write_depth: int
    read_bytes_per_s: float  # with this setting, not the drive's limit
    write_bytes_per_s: float
    mixed_bytes_per_s: float  # reads and writes together
    measured: Mapping[str, float] = field(default_factory=dict)  # of the machine, by `offload plan`


def encode(profile: Profile) -> str:
    """The file's text."""
    return json.dumps({"kind": _KIND, "version": VERSION, **asdict(profile)}, indent=1) + "\n"


def load(place: Path) -> Profile:
    """Read the profile at `place`, a file or the folder that holds it; raises ConfigError."""
    file = place / FILE_NAME if place.is_dir() else place
    try:
        if not file.is_file():  # a pipe would be waited for, a device has no end
            file.stat()
            raise _alien(file, "something that is no regular file")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise _alien(file, "a file that is too large for one")
        text = file.read_bytes().decode()
    except OSError as error:
        raise _alien(file, f"{error.strerror or error}") from None
    except UnicodeDecodeError:
        raise _alien(file, "a file that is no text") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _alien(file, "text that is no JSON") from None
    return _decode(file, value)


def remember(place: Path, measured: Mapping[str, float]) -> None:
    """Keep what `offload plan` measured in the profile at `place`; raises ConfigError, OSError."""
    file = place / FILE_NAME if place.is_dir() else place
    found = load(file)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(encode(replace(found, measured={**found.measured, **measured})))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def find(folder: Path) -> Profile | None:
    """The profile that lies in `folder`; a damaged one is told of and not used."""
    try:
        if not (folder / FILE_NAME).exists():
            return None
        return load(folder)
    except OSError:  # the folder itself cannot be looked at: its owner will tell
        return None
    except ConfigError as error:
        _LOG.warning("%s Without it, defaults are used.", error)
        return None


def choose(named: Sequence[Path], folders: Sequence[Path]) -> list[Profile | None]:
    """A profile for each of an engine's folders, in their order.

    Named ones: one for all folders, or as many as there are folders.  Raises ConfigError.
    """
    if not named:
        return [find(folder) for folder in folders]
    if len(named) not in (1, len(folders)):
        raise ConfigError(
            f"profile: expected one, or one for each of {len(folders)} paths, got {len(named)}."
        )
    loaded: list[Profile | None] = [load(place) for place in named]
    return loaded * len(folders) if len(loaded) == 1 else loaded


def _decode(file: Path, value: Any) -> Profile:
    if not isinstance(value, dict) or value.get("kind") != _KIND:
        raise _alien(file, "JSON of another kind")
    if value.get("version") != VERSION:
        raise _alien(file, f"version {value.get('version')!r}, this release reads {VERSION}")
    fields: dict[str, Any] = {name: value.get(name) for name in Profile.__dataclass_fields__}
    fields["measured"] = value.get("measured", {})
    for name, problem in _problems(fields):
        raise _alien(file, f"{name}: {problem}")
    return Profile(**fields)


def _problems(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for name in ("path", "date"):
        if not isinstance(fields[name], str) or not fields[name]:
            found.append((name, f"expected text, got {fields[name]!r}"))
    if fields["backend"] not in BACKENDS:
        found.append(("backend", f"expected {', '.join(BACKENDS)}, got {fields['backend']!r}"))
    for name, least, most in (
        ("block_bytes", 4096, 1 << 30), ("read_depth", 1, MAX_DEPTH), ("write_depth", 1, MAX_DEPTH)
    ):  # fmt: skip
        if not (type(fields[name]) is int and least <= fields[name] <= most):
            found.append((name, f"expected {least} to {most}, got {fields[name]!r}"))
        elif name == "block_bytes" and fields[name] % 4096:
            found.append((name, f"expected a multiple of 4096, got {fields[name]!r}"))
    for name in ("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s"):
        if not _is_rate(fields[name], 1e15):
            found.append((name, f"expected a rate > 0, got {fields[name]!r}"))
    measured = fields["measured"]
    if not isinstance(measured, dict) or not all(_is_rate(v, 1e18) for v in measured.values()):
        found.append(("measured", f"expected rates > 0 by name, got {measured!r}"))
    return found


def _is_rate(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 < value < most


def _alien(file: Path, got: str) -> ConfigError:
    return ConfigError(
        f"profile {file}: expected a profile of `offload-bench io`, got {' '.join(got.split())}."
        " Measure again, or remove it."
    )
