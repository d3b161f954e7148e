"""Where weights and state shall live, and the sizes that bound memory and queue depth.

offload_param      none -> DEVICE    cpu -> HOST   nvme -> DISK   absent -> what fits stays
offload_optimizer  none -> as absent, since updates run on the processor, and state on a GPU would
                   travel at each
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.errors import ConfigError

ZERO = "zero_optimization"
PARTS = {"offload_param": "weights", "offload_optimizer": "state"}
_PLACES = {"none": "device", "cpu": "host", "nvme": "disk"}
_OLD = {"cpu_offload_param": "offload_param", "cpu_offload": "offload_optimizer"}
_SIZES = {
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_model_persistence_threshold": "model_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_reuse_distance": "max_reuse_distance",
}
_MOST_CHUNK = 1 << 20


@dataclass
class Part:
    """Settings of the engine, and what is told of them by key."""

    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def placement(flat: Mapping[str, Any]) -> Part:
    """`placement` and `nvme_path`; raises ConfigError for another stage, or two devices."""
    part = Part()
    stage = flat.get(f"{ZERO}.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"config, {ZERO}.stage: expected 0, 1, 2 or 3, got {stage}.")
    if f"{ZERO}.stage" in flat and stage != 3:
        part.notes[f"{ZERO}.stage"] = (
            f"{ZERO}.stage {stage} becomes what stage 3 is in one process: weights, gradients and"
            " optimizer state are placed by the budgets, with the same numbers"
        )
    wanted: dict[str, str] = {}
    paths: list[str] = []
    for name, what in PARTS.items():
        device = _device(flat, name)
        wanted[what] = _PLACES[device] if device else "auto"
        if device == "none" and what == "state":
            wanted[what] = "auto"
            part.notes[f"{ZERO}.{name}.device"] = (
                f"{ZERO}.{name}.device none: optimizer state stays in host memory as far as it"
                " fits, since updates run on the processor"
            )
        path = flat.get(f"{ZERO}.{name}.nvme_path")
        if device == "nvme" and path and path not in paths:
            paths.append(path)
    if set(wanted.values()) != {"auto"}:
        part.settings["placement"] = wanted
    if paths:
        part.settings["nvme_path"] = paths
    return part


def _device(flat: Mapping[str, Any], name: str) -> str | None:
    """What a file says of one part, by either of two names; None: nothing."""
    device: str | None = flat.get(f"{ZERO}.{name}.device")
    old = next(key for key, new in _OLD.items() if new == name)
    if not flat.get(f"{ZERO}.{old}"):
        return device
    if device not in (None, "cpu"):
        raise ConfigError(
            f"config, {ZERO}.{old}: expected no such key beside {ZERO}.{name}.device ="
            f" {device!r}, got true. Leave {old} out."
        )
    return "cpu"


def sizes(flat: Mapping[str, Any]) -> Part:
    """What bounds the device's and the host's buffers, in elements."""
    part = Part()
    for key, ours in _SIZES.items():
        value = flat.get(f"{ZERO}.{key}")
        if value is not None:
            if value < 0:
                raise ConfigError(f"config, {ZERO}.{key}: expected at least 0, got {value}.")
            part.settings[ours] = int(min(value, 1 << 62)) if math.isfinite(value) else 1 << 62
    tile = flat.get(f"{ZERO}.sub_group_size")
    if tile is not None and tile < 1:
        raise ConfigError(f"config, {ZERO}.sub_group_size: expected at least 1, got {tile}.")
    if tile is not None and tile < _MOST_CHUNK:
        part.settings["chunk_elems"] = tile  # make_config rounds it
    elif tile is not None:
        part.notes[f"{ZERO}.sub_group_size"] = (
            f"{ZERO}.sub_group_size {tile:,}: updates run in chunks of at most {_MOST_CHUNK:,}"
            " elements anyway"
        )
    return part


def drives(flat: Mapping[str, Any]) -> Part:
    """The I/O queue: bytes of a block, and blocks in flight each way on each drive."""
    part = Part()
    for key, ours, multiple, most in (
        ("aio.block_size", "aio_block_bytes", 4096, 1 << 30),
        ("aio.queue_depth", "aio_queue_depth", 1, 256),
    ):
        value = flat.get(key)
        if value is None:
            continue
        if value < 1:
            raise ConfigError(f"config, {key}: expected at least 1, got {value}.")
        possible = int(min(max(value // multiple, 1) * multiple, most))
        part.settings[ours] = possible
        if possible != value:
            part.notes[key] = f"{key} {value}: {possible} is taken, the nearest that works"
    return part
