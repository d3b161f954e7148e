"""`engine.plan` and `offload plan`: from the decisions about a model to the printable plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from offload.engine.blueprint import Blueprint, spill_bytes
from offload.engine.connect import Parts
from offload.engine.left_out import left_out
from offload.metrics.bound import Rates
from offload.runtime.horizon import Phase
from offload.schedule.plan import Plan, Space, unit_plans
from offload.schedule.presence import device_peak_bytes
from offload.schedule.rounds import Pace
from offload.schedule.timetable import Timetable, timetable
from offload.schedule.traffic import Layout, Uses, step_traffic
from offload.store.extents import UnitExtents, lay_out_file


class PlanOnly(SystemExit):
    """Ends a script that was to show its plan, before anything is allocated or written."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(0)
        self.plan = plan


def layout_of(blueprint: Blueprint) -> Layout:
    """What decides the traffic of a step."""
    found = blueprint.found
    return Layout(
        found.units, found.persistent, blueprint.placement, blueprint.formats,
        blueprint.weight_capacity, blueprint.leaving_bytes,
    )  # fmt: skip


def guessed_uses(blueprint: Blueprint) -> Uses:
    """The order of the units before any step, and what the settings say of micro-steps."""
    config = blueprint.config
    return Uses.guessed(
        len(blueprint.found.units), config.gradient_accumulation_steps,
        by_layers=config.order == "layer",
    )  # fmt: skip


def first_plan(blueprint: Blueprint) -> Plan:
    """The plan before any step: the order of the units is a guess."""
    return _plan(blueprint, guessed_uses(blueprint), blueprint.drives.speeds, "profile", None)


def current_plan(parts: Parts) -> Plan:
    """The plan with the observed order, and what the last step told of rates and compute."""
    blueprint, residency = parts.ground.blueprint, parts.residency
    config, by_layers = blueprint.config, residency.by_layers
    uses = Uses(
        residency.order(Phase.FORWARD), residency.order(Phase.BACKWARD),
        config.gradient_accumulation_steps,
        by_layers=config.order == "layer" if by_layers is None else by_layers,
    )  # fmt: skip
    bound = parts.ground.metrics.last.get("bound")
    if bound is None:
        return _plan(blueprint, uses, blueprint.drives.speeds, "profile", None)
    rates = Rates(**bound["rates"])
    told = _plan(blueprint, uses, rates, bound["rates_from"], bound["terms"]["compute"])
    times = times_of(blueprint, uses, _pace(parts.ground.metrics.last), rates)
    return replace(told, times=times)


def times_of(
    blueprint: Blueprint, uses: Uses, pace: Pace, rates: Rates | None
) -> Timetable | None:  # fmt: skip
    """When transfers must start; None where the drives are not known."""
    if rates is None or not any((rates.read, rates.write, rates.mixed)):
        return None
    held = blueprint.overlap == "hold"
    pace = replace(pace, looked_up=_looked_up(blueprint))
    return timetable(layout_of(blueprint), uses, pace, rates, held=held)


def _looked_up(blueprint: Blueprint) -> frozenset[int]:
    """Units that embeddings alone use."""
    embed: set[int] = set()
    multiply: set[int] = set()
    for module, units in blueprint.found.hooks:
        (embed if isinstance(module, nn.Embedding | nn.EmbeddingBag) else multiply).update(units)
    return frozenset(embed - multiply)


def _pace(step: Mapping[str, Any]) -> Pace:
    """Of the last step, without its stalls and without evaluation."""
    spent = Counter(step["seconds"])
    for cause, seconds in step["stalls"].items():
        spent[cause.partition(".")[0]] -= seconds
    forward, backward, *between = (
        max(spent[name], 0.0) for name in ("forward", "backward", "step", "outside")
    )
    return Pace(forward, backward, step["bound"]["terms"]["update"], sum(between))


def _plan(
    blueprint: Blueprint, uses: Uses, rates: Rates | None, rates_from: str, compute_s: float | None
) -> Plan:
    layout = layout_of(blueprint)
    files = [lay_out_file(UnitExtents.of(unit), 0, path=0) for unit in blueprint.units]
    sides = 1 if blueprint.config.durability == "none" else 2
    return Plan(
        unit_plans(layout), blueprint.placement, step_traffic(layout, uses),
        Space(sum(file.file_bytes for file in files), sides, spill_bytes(blueprint)),
        blueprint.device_memory, blueprint.overlap, uses.micro_steps, uses.by_layers,
        rates, rates_from, compute_s, sum(unit.num_tensor_elems for unit in blueprint.units),
        left_out(blueprint), device_peak_bytes(layout, uses),
    )  # fmt: skip
