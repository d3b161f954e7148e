"""What a training engine tells of itself: files whole, phases for every loop, nothing when off."""

import json
import logging

import models
import pytest
import torch

from offload import OffloadEngine
from offload.errors import ConfigError
from offload.metrics.timeline import LANES

NUM_STEPS = 3


def make_engine(folder, **settings) -> OffloadEngine:
    defaults = {
        "nvme_path": folder, "dtype": "bfloat16", "compute_dtype": "float32", "resume": False,
        "host_memory": "64MiB", "placement": "disk", "param_persistence_threshold": 0,
        "chunk_elems": 4096,
    }  # fmt: skip
    return OffloadEngine(models.build(models.Decoder), **defaults | settings)


def train(engine: OffloadEngine, first: int = 0) -> list[dict]:
    told = []
    for index in range(first, first + NUM_STEPS):
        engine.backward(engine(*models.batch(index)))
        engine.step()
        told.append(engine.metrics.last)
    return told


def spans(path, lane: str) -> list[dict]:
    events = json.loads(path.read_text())
    tids = {
        event["tid"]
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"].startswith(lane)
    }
    return [event for event in events if event["ph"] == "X" and event["tid"] in tids]


@pytest.mark.parametrize("settings", [{"overlap": "speculate"}, {"optimizer": torch.optim.RAdam}])
def test_the_timeline_covers_every_step_and_lane(settings, tmp_path):
    path = tmp_path / "timeline.json"
    with make_engine(tmp_path, timeline_path=path, **settings) as engine:
        train(engine)
        names = {bound.unit.name for bound in engine._parts.residency.bound}
    marks = [event for event in json.loads(path.read_text()) if event["ph"] == "i"]
    assert [event["name"] for event in marks] == [f"step {n + 1}" for n in range(NUM_STEPS)]
    for lane in LANES:
        assert spans(path, lane), lane
    for phase in ("forward", "backward", "step"):
        found = [span for span in spans(path, "compute") if span["name"] == phase]
        assert len(found) == NUM_STEPS
    for lane in ("updates", "kernels", "disk writes"):
        counts = {name: 0 for name in names}
        for span in spans(path, lane):
            counts[span["name"]] += 1
        assert counts == dict.fromkeys(names, NUM_STEPS), lane


def test_what_happens_to_a_unit_happens_in_order(tmp_path):
    path = tmp_path / "timeline.json"
    with make_engine(tmp_path, timeline_path=path, overlap="hold") as engine:
        train(engine)
    first = {
        lane: {span["name"]: span for span in spans(path, lane)[::-1]}
        for lane in ("updates", "kernels", "disk reads", "disk writes")
    }
    for name, update in first["updates"].items():
        read, kernel, write = (
            first[lane][name] for lane in ("disk reads", "kernels", "disk writes")
        )
        assert update["ts"] <= read["ts"] <= kernel["ts"] <= write["ts"]
        end = update["ts"] + update["dur"]
        assert write["ts"] + write["dur"] == pytest.approx(end)
        assert update["args"]["written"]


def test_phases_partition_the_steps_and_stalls_lie_inside(tmp_path):
    with make_engine(tmp_path) as engine:
        for last in train(engine):
            assert {"forward", "backward", "step"} <= last["seconds"].keys()
            assert last["total_s"] == pytest.approx(sum(last["seconds"].values()))
            for key, stalled in last["stalls"].items():
                assert 0 <= stalled <= last["seconds"][key.partition(".")[0]] * (1 + 1e-6)
            assert 0 < last["bound"]["seconds"] <= last["total_s"] * (1 + 1e-6)
        assert last["bound"]["sentence"] in engine.metrics.report()


def test_a_plain_loop_has_the_same_phases(tmp_path):
    with make_engine(tmp_path) as engine:
        for index in range(NUM_STEPS):
            engine.module(*models.batch(index)).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            assert {"forward", "backward", "step"} <= engine.metrics.last["seconds"].keys()
        with torch.no_grad():
            engine(*models.batch(0))
        train(engine)
        assert engine.metrics.seconds["eval"] > 0


def test_the_file_has_every_step_and_goes_on_when_resumed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with make_engine(tmp_path, metrics_path=path) as engine:
        told = train(engine)
    with make_engine(tmp_path, metrics_path=path, resume=True) as engine:
        told += train(engine, NUM_STEPS)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 2 * NUM_STEPS + 1))
    assert [row["read_bytes"] for row in rows] == [record["read_bytes"] for record in told]


def test_nothing_is_written_or_timed_unless_asked_for(tmp_path, caplog):
    with caplog.at_level(logging.INFO), make_engine(tmp_path) as engine:
        before = set(tmp_path.iterdir())
        train(engine)
        assert set(tmp_path.iterdir()) == before
        assert engine.metrics.timeline is None
        job = engine._parts.ground.ledger._pending.jobs[0]
        assert all(times.submitted_ns == times.write_ns[1] == 0 for times in job.times())
    assert "time (ms)" not in caplog.text


def test_the_breakdown_is_logged_every_so_many_steps(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO),
        make_engine(tmp_path, wall_clock_breakdown=True, steps_per_print=2) as engine,
    ):
        train(engine)
    lines = [text for text in caplog.messages if "time (ms)" in text]
    assert len(lines) == 1
    assert lines[0].startswith("step 2, time (ms) | fwd: ")


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    for option in ("metrics_path", "timeline_path"):
        with pytest.raises(ConfigError, match=option):
            make_engine(tmp_path, **{option: tmp_path / "missing" / "file"})
        assert list(tmp_path.iterdir()) == []


def test_a_dropped_update_is_shown_as_not_written(tmp_path):
    path = tmp_path / "timeline.json"
    with make_engine(
        tmp_path, timeline_path=path, overlap="speculate", gradient_clipping=1e-6
    ) as engine:
        train(engine)
        assert any(key.endswith(".redo") for key in engine.metrics.stalls)
    written = [span["args"]["written"] for span in spans(path, "updates")]
    assert written.count(True) >= NUM_STEPS
