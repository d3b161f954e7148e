"""Hold a configuration against the table: flat, with numbers of the right kind.

{"zero_optimization": {"stage": 3.0}}   ->   {"zero_optimization.stage": 3}
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from offload.deepspeed_config.keys import KEYS, OLD_NAMES, Key, is_section
from offload.errors import ConfigError

AUTO = "auto"


def flatten(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by dotted path, without those that are null or "auto", and the names as written.

    Raises ConfigError for unknown keys, values of another kind, and a key under two names.
    """
    flat: dict[str, Any] = {}
    written: dict[str, str] = {}
    for path, name, value in _walk(config, "", ""):
        if path in written:
            raise ConfigError(
                f"config: {name} and {written[path]} are one setting: expected it once, got it"
                " twice. Remove one of the two."
            )
        written[path] = name
        flat[path] = _converted(value, KEYS[path], name)
    return flat, written


def _walk(
    section: Mapping[str, Any], path: str, name: str
) -> Iterator[tuple[str, str, Any]]:  # fmt: skip
    """Path in the table, path as written, value."""
    for key, value in section.items():
        written = f"{name}.{key}" if name else str(key)
        own = f"{path}.{key}" if path else str(key)
        own = OLD_NAMES.get(own, own)
        if own not in KEYS and not is_section(own):
            raise ConfigError(f"config: unknown key {written!r}.{_suggest(str(key), path)}")
        if value is None or value == AUTO:
            continue
        if own in KEYS:
            yield own, written, value
        elif own == "zero_optimization" and isinstance(value, bool):
            yield "zero_optimization.stage", written, int(value)  # the old form: true is stage 1
        elif isinstance(value, Mapping):
            yield from _walk(value, own, written)
        else:
            raise ConfigError(f"config, {written}: expected an object, got {value!r}. Correct it.")


def _suggest(key: str, section: str) -> str:
    prefix = f"{section}." if section else ""
    paths = [*KEYS, *OLD_NAMES]
    beside = {path[len(prefix) :].split(".")[0] for path in paths if path.startswith(prefix)}
    near = difflib.get_close_matches(key, sorted(beside), n=1)
    if near:
        return f" Did you mean {prefix + near[0]!r}?"
    elsewhere = [path for path in paths if path.rpartition(".")[2] == key]
    if elsewhere:
        return f" Did you mean {elsewhere[0]!r}?"
    return f" Known there: {', '.join(sorted(beside))}."


def _converted(value: Any, key: Key, name: str) -> Any:
    """The value as the table wants it; whole floats such as 5e8 are integers."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.kind == "any":
        return value
    if key.kind == "bool" and isinstance(value, bool):
        return value
    if key.kind == "float" and number and not math.isnan(value):
        return float(value)
    if key.kind == "int" and number and not math.isnan(value):
        computed = name.endswith("bucket_size")  # transformers puts 0.9 * h * h there
        if math.isinf(value):
            return value
        if computed or value == int(value):
            return int(value)
    if key.kind == "text" and isinstance(value, str):
        return value
    words = key.kind.split("|")
    if len(words) > 1 and str(value).lower() in words:
        return str(value).lower()
    expected = {
        "int": "an integer", "float": "a number", "bool": "true or false", "text": "a text",
    }.get(key.kind, f"one of {', '.join(words)}")  # fmt: skip
    raise ConfigError(f"config, {name}: expected {expected}, got {value!r}. Correct it.")
