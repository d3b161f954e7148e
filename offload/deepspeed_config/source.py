"""Where a configuration comes from: a file, a dict, or base64 text, as DeepSpeed takes them."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.deepspeed_config import hjson
from offload.errors import ConfigError


def read(source: Any) -> dict[str, Any]:
    """A copy of what `source` holds: the path of a file, a mapping, or JSON in base64.

    Raises ConfigError where it is none of them, or no HJSON.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"config: expected a path, a dict or base64 text, got {type(source).__name__}."
        )
    path = Path(source)
    try:
        if path.is_file():
            return hjson.loads(path.read_text(encoding="utf-8"), f"config {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: expected a readable text file, got {error}.") from error
    try:
        text = base64.b64decode(str(source), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"config: expected the path of a DeepSpeed file, or one in base64, got {str(source)!r},"
            " which is neither. Check the path."
        ) from None
    return hjson.loads(text, "config (base64)")
