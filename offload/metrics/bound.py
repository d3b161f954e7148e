"""What bounds a step: the greatest of the times that its resources need (DESIGN P1).  Pure.

    drives      bytes read / rate, bytes written / rate, both / rate of mixed traffic
    compute     what the calling thread does itself: forward, backward, step and the script, less
                stalls; beside a GPU less the copies that it gives, and with what it waits for
                gradients
    copies      HOST -> DEVICE, beside a GPU
    updates     the update thread in kernels and checksums
    processors  CPU seconds of the process / processors, where the model computes on them too

No term can be longer than the step, whose time is therefore at least the bound.  Compute is taken
as it ran: on processors that it shares with updates it has been slowed by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_SEEN_BYTES = 4 << 20  # less tells nothing of a drive
TOLD_SHARE = 0.1  # of compute that is the script's own: from here on it is told
WORDS = {
    "disk_read": "disk reads", "disk_write": "disk writes", "disk_mixed": "disk reads and writes",
    "compute": "compute", "copies": "copies to the device", "update": "updates",
    "processors": "processors",
}  # fmt: skip


@dataclass(frozen=True)
class Flow:
    """One direction of the drives, over some time."""

    num_bytes: int = 0
    busy_s: float = 0.0  # with at least one block in flight

    def __sub__(self, other: Flow) -> Flow:
        return Flow(self.num_bytes - other.num_bytes, self.busy_s - other.busy_s)


@dataclass(frozen=True)
class Rates:
    """What the drives together can do, in bytes per second; 0: not known."""

    read: float = 0.0
    write: float = 0.0
    mixed: float = 0.0  # reads and writes at the same time

    def best(self, other: Rates) -> Rates:
        """The greater of each: a drive can do what it has done."""
        return Rates(
            max(self.read, other.read), max(self.write, other.write), max(self.mixed, other.mixed)
        )

    @classmethod
    def seen(cls, read: Flow, write: Flow) -> Rates:
        """What this traffic shows; its mixed rate is not underestimated."""
        busy = max(read.busy_s, write.busy_s)
        both = read.num_bytes + write.num_bytes
        return cls(
            _rate(read.num_bytes, read.busy_s), _rate(write.num_bytes, write.busy_s),
            _rate(both, busy),
        )  # fmt: skip


def _rate(num_bytes: int, busy_s: float) -> float:
    return num_bytes / busy_s if num_bytes >= LEAST_SEEN_BYTES and busy_s > 0 else 0.0


@dataclass(frozen=True)
class Spent:
    """What one step used, in seconds and bytes."""

    total_s: float  # the whole step, on the wall
    script_s: float = 0.0  # of it outside forward, backward and step
    stall_s: float = 0.0  # of it waiting
    fill_s: float = 0.0  # of it weights to the device: conversions, or copies beside a GPU
    update_s: float = 0.0  # kernels and checksums, on the update thread
    cpu_s: float = 0.0  # all threads of the process
    read: Flow = Flow()
    write: Flow = Flow()


@dataclass(frozen=True)
class Machine:
    """What the step ran on."""

    processors: int
    shared: bool  # the model computes on them
    profile: Rates | None = None  # of the drives, as measured before


@dataclass(frozen=True)
class Bound:
    """The least time in which these resources could have done the step."""

    terms: Mapping[str, float]  # seconds, by the names in WORDS
    step_s: float
    script_share: float  # of compute

    @property
    def by(self) -> str:
        """The binding resource."""
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def seconds(self) -> float:
        return self.terms[self.by]

    @property
    def ratio(self) -> float:
        """The step's time as a multiple of the bound."""
        return self.step_s / self.seconds if self.seconds > 0 else 1.0

    def sentence(self) -> str:
        """Such as "bound by disk writes: the step took 1.10x the bound"."""
        script = ""
        if self.by == "compute" and self.script_share >= TOLD_SHARE:
            script = f" ({self.script_share:.0%} of it in the script, outside the engine)"
        return f"bound by {WORDS[self.by]}{script}: the step took {self.ratio:.2f}x the bound"


def bound_of(spent: Spent, machine: Machine, rates: Rates) -> Bound:
    """The terms of one step; where a rate is not known, the drives' busy time stands for it."""
    both = spent.read.num_bytes + spent.write.num_bytes
    busy = max(spent.read.busy_s, spent.write.busy_s)
    terms = {
        "disk_read": _time(spent.read.num_bytes, rates.read, spent.read.busy_s),
        "disk_write": _time(spent.write.num_bytes, rates.write, spent.write.busy_s),
        "disk_mixed": _time(both, rates.mixed, busy),
        "compute": spent.total_s - spent.stall_s,
        "update": spent.update_s,
    }
    if machine.shared:
        terms["processors"] = spent.cpu_s / machine.processors
    else:
        terms["compute"] -= spent.fill_s
        terms["copies"] = spent.fill_s
    compute = terms["compute"]
    share = spent.script_s / compute if compute > 0 else 0.0
    return Bound(terms, spent.total_s, share)


def _time(num_bytes: int, rate: float, busy_s: float) -> float:
    return num_bytes / rate if rate else busy_s
