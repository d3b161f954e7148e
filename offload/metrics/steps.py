"""The account of each step: what changed since the previous one, and what bounds it.

snapshot of the counters + the queue's flows + CPU time   at every end of step()
difference to the previous one  ->  record  ->  metrics.last, metrics.jsonl, the log
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offload.metrics.bound import WORDS, Flow, Machine, Rates, Spent, bound_of

PHASES = ("forward", "backward", "step", "eval", "outside")
SCRIPT = ("eval", "outside")
Probe = Callable[[], tuple[Flow, Flow]]  # what the queue has read and written so far
Snapshot = Mapping[str, Mapping[str, float]]


class Steps:
    """Turns snapshots into records; `last` is the newest."""

    def __init__(
        self, machine: Machine, probe: Probe, sinks: Sequence[Callable[[dict[str, Any]], None]],
        now: Snapshot,
    ) -> None:  # fmt: skip
        self.last: dict[str, Any] = {}
        self._machine = machine
        self.probe = probe
        self._sinks = sinks
        self._seen = Rates()  # the best so far
        self._counters = now
        self._flows = probe()
        self._cpu_s = time.process_time()

    def close(self, step: int, now: Snapshot) -> None:
        """End a step: `last` becomes its record, and every sink gets it."""
        flows, cpu_s = self.probe(), time.process_time()
        changed = {key: _difference(now[key], self._counters[key]) for key in now}
        read, write = (flow - before for flow, before in zip(flows, self._flows, strict=True))
        self.last = self._record(step, changed, (read, write), cpu_s - self._cpu_s)
        self._counters, self._flows, self._cpu_s = now, flows, cpu_s
        for sink in self._sinks:
            sink(self.last)

    def _record(
        self, step: int, changed: Snapshot, flows: tuple[Flow, Flow], cpu_s: float
    ) -> dict[str, Any]:
        read, write = flows
        seconds = changed["seconds"]
        phases = {name: seconds[name] for name in PHASES if name in seconds}
        work = {name: spent for name, spent in seconds.items() if name not in PHASES}
        total_s = sum(phases.values())
        spent = Spent(
            total_s,
            script_s=sum(seconds.get(name, 0.0) for name in SCRIPT),
            # Waiting for gradients is waiting for the device, which computes them meanwhile.
            stall_s=sum(
                spent
                for cause, spent in changed["stalls"].items()
                if not cause.endswith(".gradients")
            ),
            fill_s=work.get("fill", 0.0),
            update_s=work.get("update", 0.0) + work.get("checksum", 0.0),
            cpu_s=cpu_s, read=read, write=write,
        )  # fmt: skip
        busy = {"disk_read": read.busy_s, "disk_write": write.busy_s, **work, "cpu": cpu_s}
        return {
            "step": step,
            "total_s": total_s,
            "skipped": int(changed["skipped"].get("steps", 0)),
            "seconds": phases,
            "stalls": dict(changed["stalls"]),
            "busy": busy,
            "disk": {"read": read.num_bytes, "written": write.num_bytes},
            "read_bytes": dict(changed["read_bytes"]),
            "write_bytes": dict(changed["write_bytes"]),
            "read_total": sum(changed["read_bytes"].values()),
            "write_total": sum(changed["write_bytes"].values()),
            "bound": self._bound(spent),
        }

    def _bound(self, spent: Spent) -> dict[str, Any]:
        self._seen = self._seen.best(Rates.seen(spent.read, spent.write))
        profile = self._machine.profile
        rates = self._seen.best(profile) if profile else self._seen
        bound = bound_of(spent, self._machine, rates)
        return {
            "terms": dict(bound.terms),
            "seconds": bound.seconds,
            "by": bound.by,
            "ratio": bound.ratio,
            "rates": {"read": rates.read, "write": rates.write, "mixed": rates.mixed},
            "rates_from": "profile" if profile and rates == profile else "best seen",
            "sentence": bound.sentence(),
        }

    def report(self) -> str:
        """The last record for people."""
        if not self.last:
            return "no step yet"
        record, bound = self.last, self.last["bound"]
        stalled = sum(record["stalls"].values()) / max(record["total_s"], 1e-9)
        rates = " ".join(
            f"{name} {rate / 1e9:.2f}" for name, rate in bound["rates"].items() if rate
        )
        lines = [
            f"step {record['step']}: {record['total_s']:.3f} s, {bound['sentence']}",
            f"bound   {_told(_in_words(bound['terms']))} s",
            f"time    {_told(record['seconds'])} s",
            f"stalls  {stalled:.1%} of the step" + _after(": ", record["stalls"], " s"),
            f"busy    {_told(record['busy'])} s",
            f"read    {record['read_total'] / 1e9:.3f} GB" + _moved(record["read_bytes"]),
            f"written {record['write_total'] / 1e9:.3f} GB" + _moved(record["write_bytes"]),
            f"drives  {rates or 'not known'} GB/s ({bound['rates_from']})",
        ]
        return "\n".join(lines)

    def short(self) -> str:
        """The last record in a few words."""
        if not self.last:
            return ""
        record, bound = self.last, self.last["bound"]
        stalled = sum(record["stalls"].values()) / max(record["total_s"], 1e-9)
        return (
            f"{record['total_s']:.2f} s = {bound['ratio']:.2f}x {WORDS[bound['by']]},"
            f" stalled {stalled:.0%},"
            f" {record['read_total'] / 1e9:.2f}+{record['write_total'] / 1e9:.2f} GB"
        )


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {
        name: value - before.get(name, 0)
        for name, value in now.items()
        if value != before.get(name, 0)
    }


def _in_words(terms: Mapping[str, float]) -> dict[str, float]:
    return {WORDS[name]: spent for name, spent in terms.items()}


def _told(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {spent:.3f}" for name, spent in values.items() if spent >= 5e-4)


def _after(before: str, values: Mapping[str, float], behind: str) -> str:
    told = _told(values)
    return f"{before}{told}{behind}" if told else ""


def _moved(values: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in values.items() if size)
    return f": {parts}" if parts else ""
