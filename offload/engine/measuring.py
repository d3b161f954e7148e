"""Connect an engine's counters to its queue, to the files that its user asked for, and to the log.

queue.stats(), CPU time, profile of the drives  -->  Metrics  -->  metrics_path, timeline_path,
                                                                   wall_clock_breakdown
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import aio
from offload.engine.blueprint import Blueprint
from offload.metrics import Metrics
from offload.metrics.bound import Flow, Machine
from offload.metrics.lines import MetricsFile, WallClock
from offload.metrics.timeline import Timeline
from offload.optim.jobs import Job


def begin_metrics(
    metrics: Metrics, blueprint: Blueprint, queue: aio.Queue, *, resumed: bool,
    closing: contextlib.ExitStack,
) -> None:  # fmt: skip
    """Start the account of steps; raises ConfigError where a file cannot be written."""
    config = blueprint.config
    sinks: list[Callable[[dict[str, Any]], None]] = []
    timeline = None
    if config.metrics_path is not None:
        file = MetricsFile(config.metrics_path, go_on=resumed)
        closing.callback(file.close)
        sinks.append(file.write)
    if config.wall_clock_breakdown:
        sinks.append(WallClock(config.steps_per_print).write)
    if config.timeline_path is not None:
        timeline = Timeline(config.timeline_path)
        closing.callback(timeline.close)

    def probe() -> tuple[Flow, Flow]:
        stats = queue.stats()
        return (
            Flow(stats.read.num_bytes, stats.read.busy_s),
            Flow(stats.write.num_bytes, stats.write.busy_s),
        )

    machine = Machine(
        blueprint.threads.fill, blueprint.device.type == "cpu", blueprint.drives.speeds
    )
    metrics.start(machine, probe, sinks=sinks, timeline=timeline)


def show_update(job: Job, timeline: Timeline) -> None:
    """Show the units of a job that has ended, or was dropped: then there is no last write."""
    for unit in job.times():
        stages = (
            ("disk reads", unit.read_ns),
            ("kernels", unit.kernel_ns),
            ("disk writes", unit.write_ns),
        )
        end_ns = max(ended for _, (_, ended) in stages)
        if not unit.submitted_ns or not end_ns:
            continue
        timeline.span(
            "updates", unit.name, unit.submitted_ns, end_ns,
            released_ms=max(unit.released_ns - unit.submitted_ns, 0) / 1e6,
            written=unit.write_ns[1] > 0,
        )  # fmt: skip
        for lane, (begun_ns, ended_ns) in stages:
            if ended_ns:
                timeline.span(lane, unit.name, begun_ns, ended_ns)
