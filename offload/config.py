"""Settings of an engine: one frozen record, checked once.

    keyword arguments  >  OFFLOAD_* variables that `offload-train` sets  >  a file (config=)  >
    defaults

Sizes are bytes; strings such as "16GiB" or "500MB" are accepted (GB = 10^9, GiB = 2^30).
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from offload.choices import ORDERS as ORDERS
from offload.choices import PLACES as PLACES
from offload.choices import STATE_DTYPES as STATE_DTYPES
from offload.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
CHUNK_MULTIPLE, INT8_CHUNK_MULTIPLE = 2048, 262144
DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}

_SCALING = (
    "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
    "consecutive_hysteresis", "min_loss_scale",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """Where weights and state shall live: "device", "host", "disk", or "auto": what fits stays.

    Weights on the device stay gathered there; the host budget keeps them too as far as it can.
    """

    weights: str = "auto"
    state: str = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user chose; `None` means: choose well."""

    nvme_path: tuple[Path, ...]
    name: str | None = None
    gradient_accumulation_steps: int = 1
    managed_gradient_accumulation: bool = True  # False: every engine.step() acts
    gradient_clipping: float = 0.0  # 0: no clipping
    dtype: torch.dtype = torch.bfloat16  # what moves
    compute_dtype: torch.dtype | None = None  # what computes
    # With dtype=float16, as DeepSpeed names and means them:
    loss_scale: float = 0.0  # fixed; 0: dynamic
    initial_scale_power: int = 16  # the first scale is 2 to this power
    loss_scale_window: int = 1000  # steps without overflow until the scale doubles
    hysteresis: int = 2  # overflows until it halves
    consecutive_hysteresis: bool = False  # any step without overflow starts their count anew
    min_loss_scale: float = 1.0
    state_dtype: str = "fp32"  # of the optimizer's state; see STATE_DTYPES
    host_memory: int | None = None
    device_memory: int | None = None
    chunk_elems: int | None = None
    durability: str = "process"
    placement: Wanted = Wanted()  # one of PLACES, or {"weights": ..., "state": ...}
    order: str = "horizontal"  # of a step's micro-steps in train_batch; "layer": unit by unit
    overlap: str = "auto"  # speculate: update during backward; hold: at step(); auto: as it pays
    device: torch.device | None = None
    param_persistence_threshold: int = 100_000
    # In elements, as DeepSpeed's stage3_ settings; None: as the budgets allow.
    model_persistence_threshold: int | None = None  # of all small tensors together
    max_live_parameters: int | None = None  # of units on the device at a time
    prefetch_bucket_size: int | None = None  # fetched ahead of their use; 0: nothing is
    max_reuse_distance: int | None = None  # a unit that is used again within it stays
    read_only: bool = False  # evaluate what a store or a checkpoint holds, beside its owner
    resume: bool | str | None = (
        None  # True: resume; False: start fresh; "auto"; None: refuse to touch a store that exists
    )
    existing_store: str = (  # what to do about one that is refused, in words of the caller's users
        "Go on with it (resume=True, offload-train --resume), discard it (resume=False,"
        " offload-train --fresh), or give this job another name (name=)."
    )
    update_threads: int | None = None  # None: what this process may use (offload/threads.py)
    update_cpus: tuple[int, ...] = ()  # processors that the update is pinned to; empty: none
    aio_backend: str = "auto"
    aio_block_bytes: int | None = None  # None: the profile's, else 1 MiB
    aio_queue_depth: int | None = None  # blocks in flight each way on each drive; None: likewise
    profile: tuple[Path, ...] = ()  # of the drives; empty: what lies in nvme_path
    metrics_path: Path | None = None  # the account of each step, one JSON object a line
    timeline_path: Path | None = None  # in the Chrome trace format
    wall_clock_breakdown: bool = False  # log times, means over `steps_per_print` steps
    steps_per_print: int = 10
    plan_only: bool = False  # raise PlanOnly instead of making an engine


def parse_bytes(value: int | float | str, name: str) -> int:
    """Return a size in bytes; accepts 17179869184, "16GiB", "0.5 GB"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        amount, unit = float(value), ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", str(value), re.I)
        if not match or match[2].upper() not in _UNITS:
            raise ConfigError(f'{name}: expected a size such as "16GiB", got {value!r}.')
        amount, unit = float(match[1]), match[2].upper()
    if amount <= 0:
        raise ConfigError(f"{name}: expected a positive size, got {value!r}.")
    return int(amount * _UNITS[unit])


def _dtype(value: Any, name: str) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else DTYPES.get(str(value))
    if found not in DTYPES.values():
        raise ConfigError(f"{name}: expected bfloat16, float16 or float32, got {value}.")
    assert found is not None
    return found


def _device(value: Any) -> torch.device:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected cpu or cuda, got {value!r}.") from error
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ConfigError(f"device: expected one of {found} CUDA devices, got {value!r}.")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu or cuda, got {value!r}.")
    return device


def _wanted(value: Any) -> Wanted:
    if isinstance(value, Wanted):
        return value
    parts = value if isinstance(value, Mapping) else {"weights": value, "state": value}
    if not set(parts) <= {"weights", "state"} or not set(parts.values()) <= set(PLACES):
        raise ConfigError(
            f"placement: expected one of {', '.join(PLACES)}, or one each for"
            f" 'weights' and 'state', got {value!r}."
        )
    return Wanted(**parts)


def _paths(value: Any) -> tuple[Path, ...]:
    if value is None:
        return ()
    if isinstance(value, str | os.PathLike):
        return (Path(value),)
    return tuple(Path(item) for item in value)


def _cpus(value: Any) -> tuple[int, ...]:
    """Processor numbers, from a sequence or as taskset lists them: "0-3,6"."""
    try:
        if not isinstance(value, str):
            return tuple(sorted({int(item) for item in value}))
        ranges = [[int(end) for end in part.split("-")] for part in value.split(",")]
        return tuple(sorted({cpu for ends in ranges for cpu in range(ends[0], ends[-1] + 1)}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'update_cpus: expected processor numbers such as [2, 3] or "2-3", got {value!r}.'
        ) from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What `offload-train` set for the script that it runs."""
    names = {"OFFLOAD_HOST_MEMORY": "host_memory", "OFFLOAD_DEVICE_MEMORY": "device_memory",
             "OFFLOAD_DURABILITY": "durability", "OFFLOAD_AIO_BACKEND": "aio_backend",
        "OFFLOAD_OVERLAP": "overlap", "OFFLOAD_PLACEMENT": "placement",
             "OFFLOAD_STATE_DTYPE": "state_dtype", "OFFLOAD_METRICS": "metrics_path",
             "OFFLOAD_TIMELINE": "timeline_path", "OFFLOAD_ORDER": "order"}  # fmt: skip
    found: dict[str, Any] = {
        key: environment[name] for name, key in names.items() if environment.get(name)
    }
    for name, key in (("OFFLOAD_NVME", "nvme_path"), ("OFFLOAD_PROFILE", "profile")):
        if environment.get(name):
            found[key] = environment[name].split(os.pathsep)
    if environment.get("OFFLOAD_PLAN"):
        found["plan_only"] = True
    if environment.get("OFFLOAD_RESUME"):
        words: dict[str, bool | str] = {"resume": True, "fresh": False, "auto": "auto"}
        word = environment["OFFLOAD_RESUME"]
        if word not in words:
            raise ConfigError(f"OFFLOAD_RESUME: expected resume, fresh or auto, got {word!r}.")
        found["resume"] = words[word]
    assert found is not None
    return found


def make_config(
    settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ, *,
    beside: Iterable[str] = (), under: Mapping[str, Any] | None = None,
) -> EngineConfig:  # fmt: skip
    """Merge `settings` over the environment over `under`, a file's, and check everything.

    `beside`: names of options that others take: what a misspelt one may have meant.  Raises
    ConfigError.
    """
    own = [field.name for field in fields(EngineConfig)]
    known = [*own, *beside]
    for key in settings:
        if key not in own:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
            raise ConfigError(f"OffloadEngine got an unknown option {key!r}.{hint}")
    merged = {**(under or {}), **_from_environment(environment)}
    merged.update({key: value for key, value in settings.items() if value is not None})
    for key in ("host_memory", "device_memory"):
        if key in merged:
            merged[key] = parse_bytes(merged[key], key)
    for key in ("dtype", "compute_dtype"):
        if key in merged:
            merged[key] = _dtype(merged[key], key)
    if "device" in merged:
        merged["device"] = _device(merged["device"])
    if "placement" in merged:
        merged["placement"] = _wanted(merged["placement"])
    if "update_cpus" in merged:
        merged["update_cpus"] = _cpus(merged["update_cpus"])
    for key in ("nvme_path", "profile"):
        merged[key] = _paths(merged.get(key))
    for key in ("metrics_path", "timeline_path"):
        if key in merged:
            merged[key] = Path(merged[key])
    if (under or {}).get("chunk_elems") and settings.get("chunk_elems") is None:
        merged["chunk_elems"] = _possible_chunk(merged)
    config = _checked(EngineConfig(**merged))
    return _with_types(config, chosen=[key for key in _SCALING if key in settings])


def _checked(config: EngineConfig) -> EngineConfig:
    if not config.nvme_path:
        raise ConfigError(
            "nvme_path: expected a folder on a local drive, got none."
            " Pass OffloadEngine(..., nvme_path=...) or run under `offload-train --nvme DIR`."
        )
    choices: dict[str, Sequence[str]] = {
        "durability": ("process", "step", "none"), "state_dtype": STATE_DTYPES,
        "overlap": ("auto", "speculate", "hold"), "order": ORDERS,
        "aio_backend": ("auto", "uring", "libaio", "threads")}  # fmt: skip
    for key, allowed in choices.items():
        for_tests = key == "aio_backend" and config.aio_backend == "faults"  # aio.faults
        if getattr(config, key) not in allowed and not for_tests:
            raise ConfigError(
                f"{key}: expected one of {', '.join(allowed)}, got {getattr(config, key)!r}."
            )
    if config.read_only:
        if config.resume is False:
            raise ConfigError("read_only: expected resume=True or nothing, got resume=False.")
        config = replace(config, resume=True)
    _check_numbers(config)
    multiple = _chunk_multiple(config.state_dtype)
    chunk = config.chunk_elems
    if chunk is not None and (chunk < multiple or chunk % multiple):
        why = " with state_dtype='int8', whose scales are written in whole pages"
        raise ConfigError(
            f"chunk_elems: expected a multiple of {multiple}"
            f"{why if config.state_dtype == 'int8' else ''}, got {chunk}."
        )
    return config


def _chunk_multiple(state_dtype: str) -> int:
    return INT8_CHUNK_MULTIPLE if state_dtype == "int8" else CHUNK_MULTIPLE


def _possible_chunk(merged: Mapping[str, Any]) -> int:
    """A file's size, which knows nothing of multiples: rounded down, and at least one of them."""
    multiple = _chunk_multiple(merged.get("state_dtype", "fp32"))
    return max(int(merged["chunk_elems"]) // multiple, 1) * multiple


def _with_types(config: EngineConfig, *, chosen: Sequence[str]) -> EngineConfig:
    """Move no more than what computes; refuse 16-bit types that do not go together.

    `chosen`: what the user said of the loss scale.
    """
    half = (torch.bfloat16, torch.float16)
    computes = config.compute_dtype
    if config.dtype is torch.float32 and computes in half:
        config = replace(config, dtype=computes)
    if computes in half and computes is not config.dtype:
        raise ConfigError(
            f"compute_dtype: expected {config.dtype} or torch.float32 with dtype={config.dtype},"
            f" got {computes}. Use the same type for both."
        )
    if chosen and config.dtype is not torch.float16:
        raise ConfigError(
            f"{chosen[0]}: expected dtype=torch.float16 with it, got {config.dtype}, which needs no"
            " loss scale. Leave it out."
        )
    return config


def _check_numbers(config: EngineConfig) -> None:
    least = {"gradient_clipping": 0.0, "param_persistence_threshold": 0,
             "gradient_accumulation_steps": 1, "update_threads": 1, "steps_per_print": 1,
             "loss_scale": 0.0, "initial_scale_power": 0, "loss_scale_window": 1,
             "hysteresis": 1, "min_loss_scale": 2.0**-24, "max_live_parameters": 0,
             "model_persistence_threshold": 0,
             "prefetch_bucket_size": 0, "max_reuse_distance": 0, "aio_block_bytes": 4096,
             "aio_queue_depth": 1}  # fmt: skip
    for key, bound in least.items():
        value = getattr(config, key)
        if value is not None and not (math.isfinite(value) and value >= bound):
            raise ConfigError(f"{key}: expected a finite number >= {bound}, got {value}.")
    if config.aio_block_bytes is not None and config.aio_block_bytes % 4096:
        raise ConfigError(
            f"aio_block_bytes: expected a multiple of 4096, got {config.aio_block_bytes}."
        )
    if config.resume not in (None, True, False, "auto"):
        raise ConfigError(f'resume: expected True, False, "auto" or None, got {config.resume!r}.')
