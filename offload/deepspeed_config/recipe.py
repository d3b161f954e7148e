"""What a DeepSpeed file asks of this engine.

    read -> flatten -> batch, optimizer, types, placement, hints   -> Recipe
                                                                      |- settings of the engine
                                                                      |- optimizer, scheduler
                                                                      '- notes: what is different

Settings lie below keyword arguments and the command line, above defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.deepspeed_config import hints
from offload.deepspeed_config.batch import STEPS, Batch
from offload.deepspeed_config.check import flatten
from offload.deepspeed_config.keys import KEYS
from offload.deepspeed_config.optimizers import NamedOptimizer, named_optimizer
from offload.deepspeed_config.source import read
from offload.errors import ConfigError

CLIPPING = "gradient_clipping"
DEFAULT_CLIPPING = 1.0  # DeepSpeed's since 0.19; older releases clipped nothing
_HALF = {"fp16": "float16", "bf16": "bfloat16"}
_SCALING = (
    "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
    "consecutive_hysteresis", "min_loss_scale",
)  # fmt: skip


@dataclass(frozen=True)
class CsvFiles:
    """`csv_monitor`: a file for each quantity in `folder`/`job`."""

    folder: str
    job: str


@dataclass(frozen=True)
class Recipe:
    """A file's content in this engine's words."""

    raw: Mapping[str, Any]  # as read
    given: Batch  # the batch numbers of the file
    settings: Mapping[str, Any]  # fields of EngineConfig
    optimizer: NamedOptimizer | None
    scheduler: tuple[str, Mapping[str, Any]] | None  # type and params
    autocast: str | None  # type of torch.autocast around the model's forward
    cast_inputs: bool  # to what computes
    report_every: int | None  # steps between two lines in the log
    csv: CsvFiles | None
    drop_last: bool
    needs_disk: bool  # something shall live there
    notes: Mapping[str, str]  # what is told once, by the key that it is about

    def batch(self, steps: int | None = None) -> Batch:
        """The batch numbers, with `steps` micro-steps if given; raises where they disagree."""
        given = self.given if steps is None else Batch(self.given.train, self.given.micro, steps)
        return given.settle()


def recipe_of(source: Any) -> Recipe:
    """Read and translate a path, a dict, base64 text or a Recipe; raises ConfigError."""
    if isinstance(source, Recipe):
        return source
    raw = read(source)
    flat, names = flatten(raw)
    optimizer = named_optimizer(flat)
    settings, notes = _settings(flat, optimizer)
    report = flat.get("steps_per_print", 0)
    recipe = Recipe(
        raw, Batch.of(flat), settings, optimizer, _scheduler(flat), _autocast(flat),
        cast_inputs=_enabled(flat, "fp16") and flat.get("fp16.auto_cast", False),
        report_every=report if 0 < report < math.inf else None,
        csv=_csv(flat),
        drop_last=flat.get("dataloader_drop_last", False),
        needs_disk="nvme" in (flat.get(f"zero_optimization.{part}.device") for part in hints.PARTS),
        notes=notes | _without_effect(flat, names),
    )  # fmt: skip
    if flat.get("dump_state"):
        dumped = json.dumps(raw, default=str, sort_keys=True)
        recipe = Recipe(**{**recipe.__dict__, "notes": {"dump_state": dumped, **recipe.notes}})
    return recipe


def _settings(
    flat: Mapping[str, Any], optimizer: NamedOptimizer | None
) -> tuple[dict[str, Any], dict[str, str]]:
    settings: dict[str, Any] = {}
    notes: dict[str, str] = {}
    settings |= _types(flat)
    settings[CLIPPING], note = _clipping(flat, optimizer)
    if note:
        notes[CLIPPING] = note
    for key in ("managed_gradient_accumulation", "wall_clock_breakdown"):
        if key in flat:
            settings[key] = flat[key]
    settings[STEPS] = Batch.of(flat).settle().steps
    if 1 <= flat.get("steps_per_print", 0) < math.inf:
        settings["steps_per_print"] = flat["steps_per_print"]
    for section in ("optimizer", "scheduler"):
        if f"{section}.params" in flat and f"{section}.type" not in flat:
            notes[f"{section}.params"] = f"{section}.params without {section}.type says nothing"
    for part in (hints.placement(flat), hints.sizes(flat), hints.drives(flat)):
        settings |= part.settings
        notes |= part.notes
    return settings, notes


def _enabled(flat: Mapping[str, Any], section: str) -> bool:
    return bool(flat.get(f"{section}.enabled", False))


def _types(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What moves, and how the loss is scaled; neither half type: all 32 bits."""
    halves = [name for name in _HALF if _enabled(flat, name)]
    if len(halves) > 1:
        raise ConfigError(
            "config: expected one of fp16.enabled and bf16.enabled, got both. Turn one off."
        )
    moves = _HALF[halves[0]] if halves else None
    wanted = flat.get("data_types.param_dtype")
    if wanted is not None:
        wanted = _plain_type(wanted)
        if moves not in (None, wanted):
            raise ConfigError(
                f"config, data_types.param_dtype: expected {moves} beside {halves[0]}.enabled,"
                f" got {wanted}. Leave one of the two out."
            )
        moves = wanted
    settings: dict[str, Any] = {"dtype": moves or "float32"}
    if moves == "float16":
        settings |= {key: flat[f"fp16.{key}"] for key in _SCALING if f"fp16.{key}" in flat}
    if flat.get("bf16.bf16_optimizer_states"):
        settings["state_dtype"] = "bf16"
    return settings


def _plain_type(name: str) -> str:
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    name = name.removeprefix("torch.")
    return short.get(name, name)


def _clipping(flat: Mapping[str, Any], optimizer: NamedOptimizer | None) -> tuple[float, str]:
    legacy = optimizer.max_grad_norm if optimizer else None
    if CLIPPING in flat:
        if legacy not in (None, flat[CLIPPING]):
            raise ConfigError(
                f"config, optimizer.params.max_grad_norm: expected {flat[CLIPPING]}, the value of"
                f" {CLIPPING}, got {legacy}. Leave max_grad_norm out."
            )
        return float(flat[CLIPPING]), ""
    if legacy is not None:
        return float(legacy), ""
    return DEFAULT_CLIPPING, (
        f"{CLIPPING} is not given: the global norm is clipped to {DEFAULT_CLIPPING}, DeepSpeed's"
        " default since 0.19; older releases clipped nothing (0)"
    )


def _scheduler(flat: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    kind = flat.get("scheduler.type")
    if kind is None:
        return None
    params = flat.get("scheduler.params", {})
    if not isinstance(params, Mapping):
        raise ConfigError(f"config, scheduler.params: expected an object, got {params!r}.")
    return kind, {key: value for key, value in params.items() if value not in (None, "auto")}


def _autocast(flat: Mapping[str, Any]) -> str | None:
    if not _enabled(flat, "torch_autocast"):
        return None
    return _plain_type(flat.get("torch_autocast.dtype", "bfloat16"))


def _csv(flat: Mapping[str, Any]) -> CsvFiles | None:
    if not _enabled(flat, "csv_monitor"):
        return None
    job = flat.get("csv_monitor.job_name", "DeepSpeedJobName")
    return CsvFiles(flat.get("csv_monitor.output_path") or "csv_monitor", job)


def _without_effect(flat: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """A line for each reason, naming the keys; a section that is switched off asks for nothing."""
    by_reason: dict[str, list[str]] = {}
    for path, value in flat.items():
        off = isinstance(value, Mapping) and value.get("enabled") is False
        if not KEYS[path].used and not off:
            by_reason.setdefault(KEYS[path].effect, []).append(names[path])
    return {
        ", ".join(names): f"without effect here, since {reason}: {', '.join(names)}"
        for reason, names in by_reason.items()
    }
