"""The account of steps, from counters to records, by a clock of the test's own."""

import itertools
import json
import logging

import pytest

from offload.errors import ConfigError
from offload.metrics import Metrics, counters
from offload.metrics.bound import Flow, Machine, Rates
from offload.metrics.lines import MetricsFile, WallClock

MB = 10**6


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.now_ns = 1_000_000_000
        self.read, self.written = Flow(), Flow()
        monkeypatch.setattr(counters.time, "perf_counter_ns", lambda: self.now_ns)

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def probe(self) -> tuple[Flow, Flow]:
        return self.read, self.written


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def started(clock: Clock, sinks=(), profile: Rates | None = None) -> Metrics:
    metrics = Metrics()
    metrics.start(Machine(2, True, profile), clock.probe, sinks=list(sinks), timeline=None)
    return metrics


def one_step(metrics: Metrics, clock: Clock, number: int) -> None:
    """Forward 2 s of which 0.5 stalled, backward 3 s, a script of 0.25 s, step 0.5 s."""
    metrics.enter("forward")
    clock.pass_s(1.5)
    with metrics.stall("weights", "u"):
        clock.pass_s(0.5)
    metrics.enter("backward")
    with metrics.busy("fill"):
        clock.pass_s(1.0)
    clock.pass_s(2.0)
    metrics.enter("outside")
    clock.pass_s(0.25)
    with metrics.phase("step"):
        with metrics.stall("commit"):
            clock.pass_s(0.25)
        clock.pass_s(0.25)
    metrics.read_bytes["forward.param"] += 3 * MB
    metrics.write_bytes["update.param"] += 2 * MB
    clock.read = Flow(clock.read.num_bytes + 3 * MB, clock.read.busy_s + 0.5)
    clock.written = Flow(clock.written.num_bytes + 2 * MB, clock.written.busy_s + 0.75)
    metrics.close_step(number)


def test_waiting_for_gradients_of_a_device_is_its_compute(clock):
    metrics = Metrics()
    machine = Machine(2, False)
    metrics.start(machine, clock.probe, sinks=[], timeline=None)
    for number in (1, 2, 3):
        metrics.enter("backward")
        clock.pass_s(1.0)
        with metrics.stall("weights", "u"):
            clock.pass_s(0.5)
        with metrics.phase("step"), metrics.stall("gradients", "u"):
            clock.pass_s(2.0)
        metrics.close_step(number)
        assert metrics.last["stalls"]["step.gradients"] == pytest.approx(2.0)
        assert metrics.last["bound"]["terms"]["compute"] == pytest.approx(3.0)
        assert metrics.last["bound"]["by"] == "compute"


def test_phases_add_up_to_the_step_and_stalls_name_their_phase(clock):
    metrics = started(clock)
    for number in (1, 2, 3):
        one_step(metrics, clock, number)
        last = metrics.last
        assert last["step"] == number
        assert last["seconds"] == pytest.approx(
            {"forward": 2.0, "backward": 3.0, "outside": 0.25, "step": 0.5}
        )
        assert last["total_s"] == pytest.approx(5.75)
        assert last["stalls"] == pytest.approx({"forward.weights": 0.5, "step.commit": 0.25})
        assert last["busy"]["fill"] == pytest.approx(1.0)
        assert (last["busy"]["disk_read"], last["busy"]["disk_write"]) == (0.5, 0.75)
        assert last["disk"] == {"read": 3 * MB, "written": 2 * MB}
        assert (last["read_total"], last["write_total"]) == (3 * MB, 2 * MB)
        assert last["bound"]["by"] == "compute"
        assert last["bound"]["seconds"] == pytest.approx(5.0)
        assert last["bound"]["ratio"] == pytest.approx(5.75 / 5.0)


def test_what_precedes_the_start_belongs_to_no_step(clock):
    metrics = Metrics()
    clock.pass_s(100.0)
    clock.read = Flow(50 * MB, 60.0)
    metrics.read_bytes["update.param"] = 7
    metrics.start(Machine(2, True), clock.probe, sinks=[], timeline=None)
    one_step(metrics, clock, 1)
    assert metrics.last["total_s"] == pytest.approx(5.75)
    assert metrics.last["read_bytes"] == {"forward.param": 3 * MB}
    assert metrics.last["disk"]["read"] == 3 * MB


def test_a_profile_is_the_rate_until_the_drive_shows_a_better_one(clock):
    metrics = started(clock, profile=Rates(read=GB, write=GB, mixed=GB))
    one_step(metrics, clock, 1)
    assert metrics.last["bound"]["rates_from"] == "profile"
    clock.read = Flow(clock.read.num_bytes + 20 * MB, clock.read.busy_s + 0.001)
    metrics.close_step(2)
    assert metrics.last["bound"]["rates_from"] == "best seen"
    assert metrics.last["bound"]["rates"]["read"] == pytest.approx(20 * MB / 0.001)
    assert metrics.last["bound"]["rates"]["write"] == GB


GB = 10**9


def test_the_report_and_its_short_form_tell_the_last_step(clock):
    metrics = started(clock)
    assert (metrics.report(), metrics.short()) == ("no step yet", "")
    one_step(metrics, clock, 1)
    assert "bound by compute: the step took 1.15x the bound" in metrics.report()
    assert "forward.weights 0.500" in metrics.report()
    assert metrics.short() == "5.75 s = 1.15x compute, stalled 13%, 0.00+0.00 GB"


def test_the_file_has_a_line_a_step_and_goes_on_when_resumed(clock, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("left over\n")
    for go_on, steps in ((False, (1, 2, 3)), (True, (3, 4))):
        file = MetricsFile(path, go_on=go_on)
        metrics = started(clock, [file.write])
        for number in steps:
            one_step(metrics, clock, number)
        file.close()
        file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    assert rows[0].keys() == metrics.last.keys()
    assert rows[0]["bound"]["by"] == "compute"


def test_a_file_that_cannot_be_opened_is_an_error_and_one_that_fills_up_is_told(
    clock, tmp_path, caplog
):
    with pytest.raises(ConfigError, match="metrics_path"):
        MetricsFile(tmp_path / "missing" / "metrics.jsonl", go_on=False)
    file = MetricsFile(tmp_path / "metrics.jsonl", go_on=False)
    file._file = open("/dev/full", "w")  # noqa: SIM115
    metrics = started(clock, [file.write])
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            one_step(metrics, clock, number)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "before step 1" in caplog.text
    assert metrics.last["step"] == 3


def test_the_breakdown_logs_means_every_so_many_steps(clock, caplog):
    metrics = started(clock, [WallClock(2).write])
    with caplog.at_level(logging.INFO):
        for number in range(1, 6):
            one_step(metrics, clock, number)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for number, line in zip((2, 4), lines, strict=True):
        assert line.startswith(
            f"step {number}, time (ms) | fwd: 2000.00 | bwd: 3000.00 | step: 500.00"
        )


def test_without_a_timeline_spans_and_units_ask_no_clock(monkeypatch):
    metrics = Metrics()
    ticks = itertools.count()
    monkeypatch.setattr(counters.time, "perf_counter_ns", lambda: next(ticks))
    with metrics.span("commits", "generation 1"):
        pass
    metrics.reach("block")
    assert next(ticks) == 0
