"""offload plan MODEL: from what the command line says to an Outlook.

nothing is allocated, reserved or trained; what is not known of the machine's speed is measured
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from offload.cli import plan_plot, probe, shell
from offload.cli.largest import Limits, largest
from offload.cli.models import Made, make, products_of
from offload.cli.outlook import TERABYTE, Budgets, Drive, Outlook
from offload.config import ORDERS, PLACES, STATE_DTYPES, make_config
from offload.engine.blueprint import (
    Blueprint,
    alive_steps,
    default_host_memory,
    offer,
    plan,
)
from offload.engine.planning import first_plan, guessed_uses, layout_of, times_of
from offload.errors import ConfigError
from offload.optim.choice import choose
from offload.profile import choose as choose_profiles
from offload.profile import remember
from offload.schedule.account import account
from offload.schedule.device import device_least_bytes
from offload.schedule.placement import host_least_bytes, place
from offload.schedule.predict import Speeds, Threads, predict
from offload.schedule.rounds import Pace
from offload.schedule.work import Work

NAME = "offload plan"
DTYPES = ("bf16", "fp16", "fp32")
USUAL_TOKENS = 2048  # of a micro-step, where nobody says
USUAL_SEQ = 2048
USUAL_TBW = 600.0  # TB; what makers state for drives of 1 TB


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the engine's settings."""

    tokens: int | None  # of a step
    seq: int | None
    checkpointing: bool
    tbw: float | None
    measure: bool
    folders: Sequence[Path]


def outlook(made: Made, settings: Mapping[str, Any], asked: Asked) -> Outlook:
    """Plan `made` with the engine's `settings`; raises ConfigError or BudgetError."""
    chosen = choose(settings.get("optimizer") or "adamw", None, _without(settings, "optimizer"))
    blueprint = plan(made.model, make_config(chosen.rest), chosen.rule)
    layout, uses, first = layout_of(blueprint), guessed_uses(blueprint), first_plan(blueprint)
    work = _work(made, blueprint, asked)
    threads = _threads(blueprint)
    speeds, told, notes = _speeds(blueprint, work, threads, again=asked.measure)
    held = blueprint.overlap == "hold"
    found = predict(
        layout, uses, first.traffic, work=work, speeds=speeds, threads=threads,
        rates=blueprint.drives.speeds, held=held,
    )  # fmt: skip
    pace = Pace(found.forward_s, found.backward_s, found.update_s)
    times = times_of(blueprint, uses, pace, blueprint.drives.speeds)
    drive = _drive(blueprint, asked)
    limits = Limits(
        blueprint.config.host_memory or default_host_memory(), _device_limit(blueprint),
        drive.free_bytes,
    )  # fmt: skip
    return Outlook(
        made.name, replace(first, predicted=found.bound, times=times),
        account(blueprint.units, layout.formats),
        work, found, speeds, told, _budgets(blueprint), drive, limits, largest(blueprint, limits),
        (*notes, *_notes(made, blueprint, asked)),
    )  # fmt: skip


def _without(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != key and value is not None}


def _work(made: Made, blueprint: Blueprint, asked: Asked) -> Work:
    micro_steps = blueprint.config.gradient_accumulation_steps
    tokens = asked.tokens or USUAL_TOKENS * micro_steps
    if tokens < micro_steps:
        raise ConfigError(
            f"tokens: expected at least one for each of {micro_steps} micro-steps, got {tokens}."
        )
    most = min(tokens // micro_steps, made.max_seq or USUAL_SEQ, USUAL_SEQ)
    return Work(
        tuple(products_of(made.model, blueprint.found.units)), made.attention, tokens,
        min(asked.seq or most, tokens // micro_steps), asked.checkpointing or made.checkpointing,
    )  # fmt: skip


def _threads(blueprint: Blueprint) -> Threads:
    shared = blueprint.device.type == "cpu"
    return Threads(
        torch.get_num_threads(), blueprint.threads.update, blueprint.threads.fill, shared
    )  # fmt: skip


def _speeds(
    blueprint: Blueprint, work: Work, threads: Threads, *, again: bool
) -> tuple[Speeds, str, list[str]]:
    """From the profile, or measured now and kept there; how, and what could not be kept."""
    config = blueprint.config
    wanted = probe.Wanted(
        work, work.tokens // config.gradient_accumulation_steps, blueprint.compute_dtype,
        blueprint.device, threads, blueprint.threads.fill,
    )  # fmt: skip
    profiles = choose_profiles(config.profile, config.nvme_path)
    known = dict(profiles[0].measured) if profiles and profiles[0] else {}
    todo = wanted.names() if again else probe.missing(wanted, known)
    measured = {name: measure() for name, measure in todo.items()}
    told = "measured now" if measured else "from the profile"
    notes = []
    if measured and profiles and profiles[0] is not None:
        place_of = config.profile[0] if config.profile else config.nvme_path[0]
        try:
            remember(place_of, measured)
        except (OSError, ConfigError) as error:
            notes.append(f"what was measured is not kept in the profile: {error}")
    return wanted.speeds({**known, **measured}), told, notes


def _drive(blueprint: Blueprint, asked: Asked) -> Drive:
    folders = blueprint.config.nvme_path
    try:
        # Several folders on one file system share what is free there.
        free = {os.stat(folder).st_dev: shutil.disk_usage(folder).free for folder in folders}
    except OSError as error:
        raise ConfigError(
            f"nvme_path: expected folders that can be looked at, got {error.filename}:"
            f" {error.strerror}. Name others."
        ) from error
    assumed = asked.tbw is None
    tbw = USUAL_TBW * len(free) if asked.tbw is None else asked.tbw
    told = ", ".join(str(folder) for folder in folders)
    return Drive(told, sum(free.values()), tbw * TERABYTE, assumed)


def _device_limit(blueprint: Blueprint) -> int:
    """Device memory that a larger model may take: on processors what the host budget leaves."""
    config = blueprint.config
    if config.device_memory:
        return config.device_memory
    if blueprint.device.type != "cpu":
        return blueprint.device_memory
    available = 2 * default_host_memory()
    return max(available - (config.host_memory or default_host_memory()), 0)


def _budgets(blueprint: Blueprint) -> Budgets:
    found, formats = blueprint.found, blueprint.formats
    whole = place(found.units, found.persistent, formats, host_memory=None).total_bytes
    stays = sum(each.num_bytes for each in offer(found.units, blueprint.config))
    return Budgets(
        host_least_bytes(found.units, found.persistent, formats),
        device_least_bytes(
            found.units, found.persistent, formats, alive=alive_steps(blueprint.config)
        ),
        whole, whole + stays,
    )  # fmt: skip


def _notes(made: Made, blueprint: Blueprint, asked: Asked) -> list[str]:
    found = []
    if asked.tokens is None:
        found.append(f"{USUAL_TOKENS:,} tokens a micro-step are assumed; --tokens says how many")
    if not asked.folders:
        found.append("the current folder is taken for the drive; --nvme names another")
    if blueprint.drives.speeds is None:
        found.append(
            "the drives' rates are not known, so the step may take longer: run offload-bench io"
            f" {blueprint.config.nvme_path[0]}"
        )
    by_layers = blueprint.config.order == "layer"
    if by_layers and not (asked.checkpointing or made.checkpointing):
        found.append(
            "layer-major order keeps all graphs alive: checkpoint the blocks (--checkpointing)"
        )
    if made.attention is None:
        found.append("the model has no config that tells layers and width: attention is left out")
    return found


# --- the command


def _run(*, model: str, as_json: bool, plot: Path | None, **options: Any) -> None:
    names = ("tokens", "seq", "checkpointing", "tbw", "measure", "folders")
    asked = Asked(**{name: options.pop(name) for name in names})
    settings = {
        "nvme_path": list(asked.folders) or [Path.cwd()],
        "profile": list(options.pop("profiles")) or None,
        "gradient_accumulation_steps": options.pop("micro_steps"),
        **options,
    }
    with shell.one_line():
        found = outlook(make(model), settings, asked)
    click.echo(json.dumps(found.as_record(), indent=1) if as_json else str(found))
    if plot is not None:
        try:
            problem = plan_plot.draw(plot, found)
        except OSError as error:
            problem = f"{plot}: the picture cannot be written: {error.strerror}."
        if problem is not None:
            shell.refuse(NAME, problem)


def _size(name: str, text: str) -> click.Option:
    return click.Option([name], callback=shell.size, metavar="SIZE", help=text)


def _choice(name: str, values: Sequence[str], text: str) -> click.Option:
    return click.Option([name], type=click.Choice(values), help=text)


def _count(name: str, text: str, default: int | None = None) -> click.Option:
    return click.Option([name], type=click.IntRange(min=1), default=default, help=text)


OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--nvme", "folders"], callback=shell.folders, metavar="DIR", multiple=True,
        help="Folder on a local drive for the model's state; default: the current one.",
    ),
    click.Option(
        ["--profile", "profiles"], type=click.Path(path_type=Path), metavar="FILE", multiple=True,
        help="What `offload-bench io` wrote; without it, what lies in DIR is used.",
    ),
    _size("--host-memory", 'Most host memory to hold, such as "16GiB".'),
    _size("--device-memory", "Most device memory to hold."),
    _choice("--dtype", DTYPES, "What moves; default: bf16."),
    _choice("--compute-dtype", DTYPES, "What computes."),
    _choice("--state-dtype", STATE_DTYPES, "How the optimizer's state is kept."),
    _choice("--durability", ["process", "step", "none"], "What a finished step survives."),
    _choice("--placement", PLACES, "Where weights and state live."),
    click.Option(["--optimizer"], help="A name, such as adamw (default), sgd or lion."),
    _count("--tokens", f"Of a step, all micro-steps; default: {USUAL_TOKENS} a micro-step."),
    _count("--seq", "Length of a sequence, for attention."),
    _count("--micro-steps", "Of a step; default: 1."),
    _choice("--order", ORDERS, "Of the micro-steps; layer: all through a unit before the next."),
    click.Option(["--checkpointing"], is_flag=True, help="Blocks are recomputed in backward."),
    click.Option(
        ["--tbw"], type=click.FloatRange(min=0, min_open=True), callback=shell.number, metavar="TB",
        help=f"What the drives may be written; default: {USUAL_TBW:.0f} TB a drive, assumed.",
    ),
    click.Option(["--measure"], is_flag=True, help="Measure anew what the profile has."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print it all as JSON."),
    click.Option(
        ["--plot"], type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Draw it as a PNG (the bench extra).",
    ),
]  # fmt: skip

command = click.Command(
    NAME, callback=_run, params=[*OPTIONS, click.Argument(["model"])],
    help="""Tell what training MODEL would take here, before any training.

    MODEL: a folder or config.json of Hugging Face, module:function that returns a model, or a
    number of parameters such as 7B, for a generic decoder.  Nothing is allocated or written, but
    measured speeds are kept in the drive's profile.

    A Python script instead, with the options of offload-train before it (--nvme DIR), runs until
    it makes its engine, whose plan is printed.""",
)  # fmt: skip
