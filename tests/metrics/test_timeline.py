"""Files in the Chrome trace format: whole, nested, and harmless when they cannot be written."""

import itertools
import json
import logging
import threading

import pytest

from offload.errors import ConfigError
from offload.metrics.bound import Flow
from offload.metrics.timeline import LANES, Timeline


def events(path) -> list[dict]:
    return json.loads(path.read_text())


def spans(path) -> list[dict]:
    return [event for event in events(path) if event["ph"] == "X"]


def test_spans_that_overlap_get_rows_of_their_own_and_others_share(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    base = timeline._origin
    for start, stop in ((0, 10), (5, 15), (10, 20), (15, 30), (2, 3)):
        timeline.span("updates", f"{start}", base + start * 1000, base + stop * 1000)
    timeline.close()
    rows: dict[int, list[tuple[float, float]]] = {}
    for span in spans(timeline.path):
        rows.setdefault(span["tid"], []).append((span["ts"], span["ts"] + span["dur"]))
    assert sum(len(row) for row in rows.values()) == 5
    assert len(rows) == 3
    for row in rows.values():
        row.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(row))
    named = {event["tid"] for event in events(timeline.path) if event["name"] == "thread_name"}
    assert named == rows.keys()


def test_lanes_do_not_share_rows(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    for lane in LANES:
        for _ in range(3):
            timeline.span(lane, lane, timeline._origin, timeline._origin + 1000)
    timeline.close()
    owner: dict[int, str] = {}
    for span in spans(timeline.path):
        assert owner.setdefault(span["tid"], span["name"]) == span["name"]
    assert len(owner) == 3 * len(LANES)


def test_units_follow_each_other_and_end_with_their_phase(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    base = timeline._origin
    timeline.reach("a", base + 1000)
    timeline.reach("b", base + 2000)
    timeline.phase("forward", base, base + 4000)
    timeline.phase("outside", base + 4000, base + 9000)
    timeline.close()
    found = [(span["name"], span["ts"], span["dur"]) for span in spans(timeline.path)]
    assert found == [
        ("a", 1.0, 1.0), ("b", 2.0, 2.0), ("forward", 0.0, 4.0), ("outside", 4.0, 5.0)
    ]  # fmt: skip


def test_the_drives_rate_is_that_between_two_looks(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    timeline.flows(Flow(10**9, 1.0), Flow(0, 0.0))
    timeline.flows(Flow(10**9, 1.0), Flow(10**9, 1.0))
    timeline.close()
    first, second = (event["args"] for event in events(timeline.path) if event["ph"] == "C")
    assert first["read"] > 0 == first["written"]
    assert second["read"] == 0 < second["written"]


def test_a_file_without_its_end_holds_every_step_that_ended(tmp_path):
    """Killed: what was flushed is there, and only the bracket is missing."""
    timeline = Timeline(tmp_path / "t.json")
    for number in (1, 2, 3):
        timeline.span("compute", "forward", timeline._origin, timeline._origin + 1)
        timeline.step(number, timeline._origin)
    found = json.loads(timeline.path.read_text() + "]")
    assert [event["name"] for event in found if event["ph"] == "i"] == [
        "step 1", "step 2", "step 3"
    ]  # fmt: skip
    timeline.close()


def test_threads_may_add_at_the_same_time(tmp_path):
    timeline = Timeline(tmp_path / "t.json")

    def add(lane: str) -> None:
        for index in range(200):
            timeline.span(lane, f"{index}", timeline._origin, timeline._origin + index)

    threads = [threading.Thread(target=add, args=(lane,)) for lane in LANES[:4]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    timeline.close()
    assert len(spans(timeline.path)) == 800


def test_a_disk_that_is_full_ends_the_timeline_and_not_the_training(tmp_path, caplog):
    with pytest.raises(ConfigError, match="timeline_path"):
        Timeline(tmp_path / "missing" / "t.json")
    timeline = Timeline(tmp_path / "t.json")
    timeline._file = open("/dev/full", "w")  # noqa: SIM115
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            timeline.step(number, timeline._origin)
    timeline.close()
    assert len(caplog.records) == 1
