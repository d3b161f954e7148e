"""What `offload plan MODEL` tells: the plan, the account of state, a predicted step, limits.

model, settings  ->  Blueprint  ->  Plan      what lives where, what a step moves
                 ->  Account                  state by kind
measured speeds  ->  Prediction               time of a step, with its bound
free space       ->  Largest                  what else would fit
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from offload.cli.largest import Largest, Limits
from offload.schedule.account import Account
from offload.schedule.plan import Plan, in_bytes
from offload.schedule.predict import Prediction, Speeds
from offload.schedule.work import Work

TERABYTE = 10**12


@dataclass(frozen=True)
class Budgets:
    """The smallest budgets that work, in bytes, and what more would save."""

    host_least: int
    device_least: int
    host_without_spilling: int  # every gradient in host memory
    host_without_reading: int  # weights and state too


@dataclass(frozen=True)
class Drive:
    """The disk under the store."""

    folder: str
    free_bytes: int
    endurance_bytes: float  # that it may be written, before it is worn
    assumed: bool  # the user did not say

    def steps(self, written_bytes: int) -> float:
        """Steps until that is reached."""
        return self.endurance_bytes / written_bytes if written_bytes else float("inf")


@dataclass(frozen=True)
class Outlook:
    """All of it; str() is for people, `as_record` for programs."""

    name: str
    plan: Plan
    account: Account
    work: Work
    prediction: Prediction
    speeds: Speeds
    speeds_from: str
    budgets: Budgets
    drive: Drive
    limits: Limits
    largest: Largest
    notes: tuple[str, ...] = ()

    @property
    def written_bytes(self) -> int:
        """Of one step."""
        return sum(self.plan.traffic.written.values())

    @property
    def read_bytes(self) -> int:
        """Of one step; less by what updates likely take from fetches, where they run ahead."""
        return self.plan.traffic.likely_read(held=self.plan.overlap == "hold")

    def __str__(self) -> str:
        parts = (
            [f"model   {self.name}"], self._account(), [""], str(self.plan).splitlines(),
            self._prediction(), self._drive(), self._limits(),
            [f"note    {note}" for note in self.notes],
        )  # fmt: skip
        return "\n".join(line for part in parts for line in part)

    def _account(self) -> Iterator[str]:
        account = self.account
        yield f"        {account.num_params:,} parameters, {account.num_trained:,} trained"
        yield ""
        names = ("in memory", "a parameter", "here", "a parameter")
        yield f"{'state':<12}" + "".join(f"{name:>13}" for name in names)
        for kind, plain in account.in_memory.items():
            yield _row(kind, plain, account.here.get(kind, 0), account.num_params)
        total = sum(account.in_memory.values()), sum(account.here.values())
        yield _row("sum", *total, account.num_params)

    def _prediction(self) -> Iterator[str]:
        work, speeds, found = self.work, self.speeds, self.prediction
        ratio, rate = found.step_s / _least(found), work.tokens / found.step_s
        yield (
            f"time    {found.step_s:.3f} s a step predicted, {ratio:.2f}x the bound:"
            f" {work.tokens:,} tokens, {rate:,.3g} a second"
        )
        attention = "" if work.attention else " without attention, of which the model tells nothing"
        again = ", forward recomputed in backward" if work.recomputed else ""
        yield (
            f"        {work.flops / 1e12:.3f} TFLOP a step{attention}{again}, in sequences of"
            f" {work.seq:,}; {speeds.flops / 1e9:,.0f} GFLOP/s, updates at"
            f" {speeds.update / 1e9:.1f} GB/s ({self.speeds_from})"
        )

    def _drive(self) -> Iterator[str]:
        drive, written = self.drive, self.written_bytes
        need = self.plan.space.total
        short = need - drive.free_bytes
        fits = f", {in_bytes(short)} short" if short > 0 else ""
        free = in_bytes(drive.free_bytes)
        yield f"space   {in_bytes(need)} of {free} free in {drive.folder}{fits}"
        assumed = " (assumed; --tbw)" if drive.assumed else ""
        yield (
            f"wear    {in_bytes(written)} written a step: {drive.steps(written):,.0f} steps until"
            f" {drive.endurance_bytes / TERABYTE:,.0f} TB are written{assumed}"
        )

    def _limits(self) -> Iterator[str]:
        least = self.budgets
        yield (
            f"least   host {in_bytes(least.host_least)}, device {in_bytes(least.device_least)};"
            f" host {in_bytes(least.host_without_spilling)} keeps all gradients in memory,"
            f" {in_bytes(least.host_without_reading)} all weights and state too"
        )
        limits = self.limits
        within = (
            f"host {in_bytes(limits.host)}, device {in_bytes(limits.device)}, disk"
            f" {in_bytes(limits.disk)}"
        )
        if self.largest.shape is None:
            yield f"largest none: {self.largest.limit} is too small ({within})"
            return
        count = self.largest.shape.num_params / 1e9
        yield (
            f"largest {count:,.2f} billion parameters on this machine, limited by"
            f" {self.largest.limit} ({within}; activations not counted): {self.largest.shape}"
        )

    def as_record(self) -> dict[str, Any]:
        """JSON values: sizes in bytes, times in seconds, rates per second."""
        plan, found = self.plan, self.prediction
        return {
            "model": self.name,
            "num_params": self.account.num_params,
            "num_trained": self.account.num_trained,
            "state": {"in_memory": dict(self.account.in_memory), "here": dict(self.account.here)},
            "host": {"total": plan.placement.total_bytes, **_host_parts(plan)},
            "device": {"budget": plan.device_memory, "at_work": plan.device_peak},
            "disk": {
                "total": plan.space.total, "one_side": plan.space.one_side,
                "sides": plan.space.num_sides, "spilled": plan.space.spilled,
                "free": self.drive.free_bytes, "folder": self.drive.folder,
            },
            "step": {
                "read": self.read_bytes, "written": self.written_bytes,
                "read_by": dict(plan.traffic.read), "written_by": dict(plan.traffic.written),
                "lent": plan.traffic.lent, "micro_steps": plan.micro_steps,
                "order": "layer" if plan.by_layers else "horizontal",
                "tokens": self.work.tokens, "seq": self.work.seq, "flops": self.work.flops,
                "seconds": found.step_s, "bound": found.bound.seconds, "by": found.bound.by,
                "terms": dict(plan.terms),
            },
            "speeds": {**asdict(self.speeds), "from": self.speeds_from},
            "drive_rates": asdict(plan.rates) if plan.rates else None,
            "endurance": {
                "bytes": self.drive.endurance_bytes, "assumed": self.drive.assumed,
                "steps": self.drive.steps(self.written_bytes) if self.written_bytes else None,
            },
            "times": asdict(plan.times) if plan.times else None,
            "least": asdict(self.budgets),
            "largest": {
                "num_params": self.largest.shape.num_params if self.largest.shape else 0,
                "shape": str(self.largest.shape) if self.largest.shape else None,
                "limit": self.largest.limit, "limits": asdict(self.limits),
            },
            "units": [asdict(unit) for unit in plan.units],
            "not_offloaded": list(plan.left_out),
            "notes": list(self.notes),
        }  # fmt: skip


def _row(kind: str, plain: int, here: int, num_params: int) -> str:
    num = num_params or 1
    return (
        f"{kind:<12} {in_bytes(plain):>12} {plain / num:>12.2f} {in_bytes(here):>12}"
        f" {here / num:>12.2f}"
    )


def _host_parts(plan: Plan) -> Mapping[str, int]:
    place = plan.placement
    return {
        "small": place.persistent_bytes, "slots": place.slot_bytes, "gradients": place.held_bytes,
        "resident": place.resident_bytes, "copies": place.undo.num_bytes,
    }  # fmt: skip


def _least(prediction: Prediction) -> float:
    return prediction.bound.seconds or prediction.step_s
