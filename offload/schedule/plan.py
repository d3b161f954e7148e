"""The plan of a run: what lives where, what a step moves, what bounds it.  Data, and printable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from offload.metrics.bound import WORDS, Bound, Rates
from offload.partition.unit import Unit
from offload.schedule.placement import Placement
from offload.schedule.timetable import Timetable
from offload.schedule.traffic import Layout, Traffic


@dataclass(frozen=True)
class UnitPlan:
    """Where the parts of a unit live between their uses: "device", "host", "disk" or "-"."""

    name: str
    num_params: int
    weights: str
    state: str
    gradients: str


@dataclass(frozen=True)
class Space:
    """What the run takes of the disk, in bytes."""

    one_side: int
    num_sides: int
    spilled: int

    @property
    def total(self) -> int:
        return self.one_side * self.num_sides + self.spilled


@dataclass(frozen=True)
class Plan:
    """`traffic` is that of every step but the first, in which moments are known to be zero."""

    units: Sequence[UnitPlan]
    placement: Placement
    traffic: Traffic
    space: Space
    device_memory: int
    overlap: str  # "hold", "speculate" or "auto"
    micro_steps: int = 1
    by_layers: bool = False  # layer-major order
    rates: Rates | None = None  # of the drives
    rates_from: str = "profile"
    compute_s: float | None = None  # of a step, as observed
    num_params: int = 0
    left_out: Sequence[str] = ()  # what is not offloaded, and why
    device_peak: int = 0  # most bytes of weights and gradients on the device
    predicted: Bound | None = None  # of a step that has not run
    times: Timetable | None = None  # where the seconds of compute and the drives' rates are known

    @property
    def terms(self) -> Mapping[str, float]:
        """Seconds that each resource needs for a step, as far as is known (metrics/bound.py)."""
        if self.predicted is not None:
            return {name: spent for name, spent in self.predicted.terms.items() if spent}
        read, written = (sum(part.values()) for part in (self.traffic.read, self.traffic.written))
        terms = {}
        if self.rates is not None:
            pairs = (
                ("disk_read", read, self.rates.read),
                ("disk_write", written, self.rates.write),
                ("disk_mixed", read + written, self.rates.mixed),
            )
            terms = {name: size / rate for name, size, rate in pairs if rate}
        if self.compute_s is not None:
            terms["compute"] = self.compute_s
        return terms

    def __str__(self) -> str:
        lines = [f"{'unit':<40} {'parameters':>18}  weights  state  gradients"]
        lines += list(_unit_lines(self.units))
        lines += ["", *self._memory(), *self._moves(), *self._bound()]
        if self.times is not None:
            lines += self.times.lines(self.placement)
        return "\n".join([*lines, *(f"stays   {reason}" for reason in self.left_out)])

    def _memory(self) -> Iterator[str]:
        place = self.placement
        yield (
            f"device  budget {in_bytes(self.device_memory)}, of it at most"
            f" {in_bytes(self.device_peak)} for weights and gradients at work"
        )
        yield (
            f"host    {in_bytes(place.total_bytes)} = {in_bytes(place.persistent_bytes)} small"
            f" tensors + {in_bytes(place.slot_bytes)} slots + {in_bytes(place.held_bytes)}"
            f" gradients + {in_bytes(place.resident_bytes)} weights and state that stay"
            + (f" + {in_bytes(place.undo.num_bytes)} copies" if place.undo.copied else "")
        )
        yield (
            f"slots   {place.fetch_slots} fetch of {in_bytes(place.fetch_slot_bytes)},"
            f" {place.update_slots} update of {in_bytes(place.update_slot_bytes)},"
            f" {place.spill_slots} spill of {in_bytes(place.spill_slot_bytes)},"
            f" {place.landing_slots} landing of {in_bytes(place.landing_slot_bytes)};"
            f" chunks of {place.chunk_elems:,} elements"
        )
        yield from place.undo.lines()
        sides = "side" if self.space.num_sides == 1 else "sides"
        yield (
            f"disk    {in_bytes(self.space.total)} = {self.space.num_sides} {sides} of"
            f" {in_bytes(self.space.one_side)} + {in_bytes(self.space.spilled)} spilled gradients"
        )

    def _moves(self) -> Iterator[str]:
        order = "unit by unit (layer-major)" if self.by_layers else "one after another"
        steps = f", {self.micro_steps} micro-steps {order}" if self.micro_steps > 1 else ""
        per_param = self.traffic.total / self.num_params if self.num_params else 0.0
        yield f"step    {per_param:.1f} bytes a parameter between disk and host{steps}"
        for verb, moved in (("read", self.traffic.read), ("written", self.traffic.written)):
            parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in moved.items())
            yield f"  {verb:<8} {in_bytes(sum(moved.values()))}{': ' if parts else ''}{parts}"
        if self.overlap != "hold" and self.traffic.lent:
            yield (
                f"  up to {in_bytes(self.traffic.lent)} less is read: weights fetched for backward"
                " serve the update"
            )

    def _bound(self) -> Iterator[str]:
        terms = self.terms
        if not terms:
            yield "bound   not known: no profile (offload-bench io) and no step yet"
            return
        by = max(terms, key=lambda name: terms[name])
        source = self.rates_from if self.rates is not None else "not known"
        told = ", ".join(f"{WORDS[name]} {seconds:.3f} s" for name, seconds in terms.items())
        yield f"bound   {terms[by]:.3f} s by {WORDS[by]} (drives: {source}): {told}"
        if "compute" not in terms:
            yield "        compute is not known before the first step"


def unit_plans(layout: Layout) -> list[UnitPlan]:
    """A line for each unit, the small tensors last."""
    plans = [_unit_plan(layout, unit) for unit in layout.units]
    if layout.persistent is not None:
        unit = layout.persistent
        plans.append(UnitPlan(unit.name, unit.num_tensor_elems, "device", "host", "host"))
    return plans


def _unit_plan(layout: Layout, unit: Unit) -> UnitPlan:
    weights = unit.states.weights.fetched
    states = [role for role in unit.roles if role not in weights]
    gradients = "disk" if unit.index in layout.placement.spilled else "host"
    trains = bool(unit.trainable_elems)
    roles = [role for role in states if unit.role_bytes(role)]
    on_device = {(each.unit, each.role) for each in layout.placement.on_device}
    state = _place([layout.stays(unit, role) for role in roles])
    if roles and all((unit.index, role) in on_device for role in roles):
        state = "device"
    kept = unit.index in layout.placement.kept
    return UnitPlan(
        unit.name, unit.num_tensor_elems,
        "device" if kept else _place([layout.stays(unit, role) for role in weights]),
        state, gradients if trains else "-",
    )  # fmt: skip


def _place(here: Sequence[bool]) -> str:
    if not here:
        return "-"
    return "host" if all(here) else "part" if any(here) else "disk"


def _unit_lines(units: Sequence[UnitPlan]) -> Iterator[str]:
    """Neighbours that are alike share a line."""
    for _, group in groupby(units, lambda u: (u.num_params, u.weights, u.state, u.gradients)):
        alike = list(group)
        one = alike[0]
        name = one.name if len(alike) == 1 else f"{one.name} ... {alike[-1].name}"
        count = f"{one.num_params:,}" if len(alike) == 1 else f"{len(alike)} x {one.num_params:,}"
        yield f"{name:<40} {count:>18}  {one.weights:<7}  {one.state:<5}  {one.gradients}"


def in_bytes(num_bytes: float) -> str:
    """1500000 -> '1.50 MB'."""
    for name, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {name}"
    return f"{num_bytes:.0f} B"
