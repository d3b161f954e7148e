"""offload-bench io: measures what it says, leaves only a profile behind, names the best setting."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from offload import profile
from offload.cli import bench, fio, io_bench, io_plot, io_sweep, shell
from offload.cli.io_sweep import OPERATIONS, QueueSetting, Sample, Setting

PIECE = 64 << 10


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_sweep, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(io_sweep, "LEAST_FILE_BYTES", 4 * PIECE)
    monkeypatch.setattr(io_sweep, "BLOCKS", (4096, 16384))
    monkeypatch.setattr(io_sweep, "DEPTHS", (2, 4))
    monkeypatch.setattr(io_sweep, "USUAL", (16384, 4))
    monkeypatch.setattr(io_sweep, "SAMPLE_S", 1e-9)
    monkeypatch.setattr(io_bench, "ENGINE_S", 1e-9)
    monkeypatch.setattr(fio, "installed", lambda: False)


def run(*arguments: object) -> None:
    shell.parse(bench.command, [str(item) for item in arguments])


def sample(*, backend: str = "uring", depth: int = 2, rate: int = 1) -> io_sweep.Sample:
    return io_sweep.Sample(io_sweep.Setting("read", backend, 4096, depth), rate * 10**9, 1.0)


def test_the_file_is_written_whole_and_has_no_name(tmp_path: Path) -> None:
    with io_sweep.Target(tmp_path, 1 << 20) as target:
        assert not list(tmp_path.iterdir())
        assert target.file.size == target.num_bytes == 1 << 20
        target.fill()
        on_disk = np.empty(1 << 20, np.uint8)
        with io_sweep.aio.Queue() as queue:
            queue.read(target.file, on_disk, 0).wait()
        written = np.frombuffer(target.buffer.view, np.uint8)
        rounds = (1 << 20) // len(written)
        assert np.array_equal(on_disk, np.tile(written, rounds))
        assert len(np.unique(on_disk)) == 256  # nothing that a drive could compress
        del written


@pytest.mark.parametrize("operation", io_sweep.OPERATIONS)
def test_a_sample_counts_whole_pieces(operation: str, tmp_path: Path) -> None:
    setting = io_sweep.Setting(operation, "threads", 4096, 4)
    with io_sweep.Target(tmp_path, 1 << 20) as target:
        target.fill()
        found = io_sweep.measure(target, setting, seconds=1e-9)
    assert found.num_bytes == (io_sweep.NUM_PIECES) * PIECE
    assert found.seconds > 0


def test_mixed_transfers_never_read_what_is_being_written() -> None:
    for operation, kinds in (("read", {False}), ("write", {True}), ("mixed", {False, True})):
        some = list(itertools.islice(io_sweep.transfers(operation, 8 * PIECE), 32))
        assert {writes for writes, _ in some} == kinds
        assert all(0 <= offset <= 7 * PIECE and offset % PIECE == 0 for _, offset in some)
        if operation == "mixed":
            assert {offset >= 4 * PIECE for writes, offset in some if writes} == {True}
            assert {offset >= 4 * PIECE for writes, offset in some if not writes} == {False}


def test_json_holds_every_setting_and_what_the_engine_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("io", tmp_path, "--size", "1MiB", "--json")
    record = json.loads(capsys.readouterr().out)
    settings = {tuple(list(row.values())[:4]) for row in record["samples"]}
    backend = record["engine"]["backend"]
    others = {row["backend"] for row in record["samples"]} - {backend}
    assert "threads" in {backend, *others}
    assert len(settings) == 3 * (2 * 2 + len(others))
    assert len(record["samples"]) == 3 * (2 * 2 + 2 * (len(others) + 1))
    assert record["num_skipped"] == 0
    for rate in record["bytes_per_s"].values():
        assert rate["limit"] >= rate["engine"] > 0
        assert rate["fio"] is None
    assert record["fio"] == "not compared: fio is not installed"


def test_the_folder_keeps_a_profile_that_engines_find_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("io", tmp_path, "--size", "1MiB", "--json")
    record = json.loads(capsys.readouterr().out)
    files = [tmp_path / profile.FILE_NAME, tmp_path / "offload.profile.png"]
    assert record["files"] == [str(file) for file in files]
    assert sorted(tmp_path.iterdir()) == files
    assert files[1].read_bytes().startswith(b"\x89PNG")
    found = profile.find(tmp_path)
    assert found is not None
    assert found.path == str(tmp_path)
    for name, value in record["engine"].items():
        assert getattr(found, name) == value
    for operation in OPERATIONS:
        rate = getattr(found, f"{operation}_bytes_per_s")
        assert rate == record["bytes_per_s"][operation]["engine"]
    run("io", tmp_path, "--size", "1MiB")  # again, over what is there
    assert sorted(tmp_path.iterdir()) == files


def test_without_matplotlib_the_profile_is_written_and_the_lack_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("io", tmp_path, "--size", "1MiB")
    assert [file.name for file in tmp_path.iterdir()] == [profile.FILE_NAME]
    assert io_plot.NO_MATPLOTLIB in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("fio"), reason="fio is not installed")
def test_fio_measures_the_same_nameless_file(tmp_path: Path) -> None:
    """The time is bounded by the file here: `seconds` would be."""
    with io_sweep.Target(tmp_path, 1 << 20) as target:
        target.fill()
        path = Path(f"/proc/{os.getpid()}/fd/{target.file.fileno()}")
        for operation in OPERATIONS:
            setting = fio.FioSetting("psync", 16384, 2)
            found = fio.run_fio(path, operation, setting, num_bytes=1 << 20, huge=False)
            assert found.num_bytes == 1 << 20
        assert not list(tmp_path.iterdir())
        none = fio.FioSetting("no-such", 4096, 1)
        with pytest.raises(RuntimeError, match="no-such"):
            fio.run_fio(path, "read", none, num_bytes=4096, huge=False)


def test_a_slow_drive_gets_fewer_settings_and_all_operations(tmp_path: Path) -> None:
    with io_sweep.Target(tmp_path, 1 << 20) as target:
        target.fill()
        asked: list[Setting] = []
        samples, backend = io_sweep.sweep(
            target, ["threads", "uring"], until=0.0, measured=asked.append
        )
    assert backend == "threads"
    assert [sample.setting for sample in samples] == asked
    assert [setting.operation for setting in asked] == list(OPERATIONS)
    assert io_sweep.choose(samples, backend) == QueueSetting("threads", 16384, 4, 4)


def test_a_slow_drive_gets_a_shorter_file(tmp_path: Path) -> None:
    with io_sweep.Target(tmp_path, 2 << 20) as target:
        target.fill(seconds=-1.0)
        assert target.num_bytes == 4 * PIECE


def rates(**best: tuple[int, int]) -> list[Sample]:
    """Samples of a drive that gets 2 GB/s from (block, depth) on, and half of it below."""
    return [
        Sample(Setting(op, "uring", block, depth), 1, 0.5 if enough else 1.0)
        for op, (least_block, least_depth) in best.items()
        for block in (4096, 16384, 65536)
        for depth in (2, 4, 8)
        for enough in [block >= least_block and depth >= least_depth]
    ]


def test_the_smallest_setting_that_is_fast_enough_is_chosen() -> None:
    samples = rates(read=(4096, 4), write=(16384, 2), mixed=(16384, 4))
    assert io_sweep.choose(samples, "uring") == QueueSetting("uring", 16384, 4, 2)
    samples = rates(read=(4096, 2), write=(4096, 8), mixed=(4096, 2))
    assert io_sweep.choose(samples, "uring") == QueueSetting("uring", 4096, 2, 8)


def test_the_first_backend_stays_unless_another_is_clearly_faster() -> None:
    def backend(seconds: float) -> str:
        samples = [
            Sample(Setting(operation, name, 4096, 2), 100, taken)
            for operation in OPERATIONS
            for name, taken in (("uring", 1.0), ("libaio", seconds))
        ]
        return io_sweep.best_backend(samples, ["uring", "libaio"])

    assert [backend(0.95), backend(0.8), backend(2.0)] == ["uring", "libaio", "uring"]


def test_a_rate_that_falls_after_a_burst_is_seen() -> None:
    assert io_sweep.fall([2.0] * 10 + [0.5] * 10) == (2.0, 0.5)
    assert io_sweep.fall([2.0, 1.9, 2.0, 1.7, 2.1, 1.9, 1.8, 1.7]) is None
    assert io_sweep.fall([1.0, 1.0, *[2.0] * 8]) is None


def result(**changes: object) -> io_bench.Result:
    setting = QueueSetting("uring", 4096, 2, 3)
    known = {
        "folder": Path("/mnt"), "file_system": "ext4", "direct": True,
        "samples": tuple(rates(read=(4096, 2), write=(4096, 2), mixed=(4096, 2))),
        "num_skipped": 0, "setting": setting,
        "rates": dict.fromkeys(OPERATIONS, io_bench.Rate(1.9, 1.8, 2.0)),
        "sustained": (), "seconds": 0.0, "fio": "fio uring 1M x 8",
    }  # fmt: skip
    return io_bench.Result(**known | changes)


def test_what_disturbs_a_measurement_is_told() -> None:
    assert list(io_bench.warnings(result())) == []
    fallen = result(sustained=(2e9,) * 8 + (5e8,) * 8, seconds=60.0)
    assert "2.00 GB/s at first, 0.50 GB/s at the end of 60 s" in next(io_bench.warnings(fallen))
    slower = result(rates=dict.fromkeys(OPERATIONS, io_bench.Rate(1.0, None, 1.0)))
    assert [line.partition(":")[0] for line in io_bench.warnings(slower)] == list(OPERATIONS)
    assert "page cache" in next(io_bench.warnings(result(direct=False)))
    assert "3 settings were left out" in next(io_bench.warnings(result(num_skipped=3)))


def test_the_report_shows_the_limit_what_the_engine_gets_and_fio() -> None:
    one = io_bench.Rate(1.9e9, 1.8e9, 2e9)
    lines = io_bench.report(result(rates=dict.fromkeys(OPERATIONS, one))).splitlines()
    assert "read        2.00    1.90     95%    1.80" in lines
    assert "engine: uring, blocks of 4.0 KiB, 2 reads and 3 writes in flight" in lines
    without = result(rates=dict.fromkeys(OPERATIONS, io_bench.Rate(1e9, None, 2e9)))
    assert "read        2.00    1.00     50%       -" in io_bench.report(without).splitlines()


def test_writing_on_and_on_is_counted_whole(tmp_path: Path) -> None:
    with io_sweep.Target(tmp_path, 1 << 20) as target:
        target.fill()
        found = io_sweep.sustain(target, QueueSetting("threads", 4096, 2, 2), seconds=1e-9)
    assert len(found) == 8
    assert sum(rate > 0 for rate in found) >= 1


def test_the_table_names_the_best_setting() -> None:
    text = io_bench.table([sample(depth=2), sample(depth=4, rate=3),
                           sample(backend="libaio", depth=4)])  # fmt: skip
    assert text.splitlines()[-1] == "best: 3.00 GB/s with uring, blocks of 4.0 KiB, depth 4"
    rows = [line.split() for line in text.splitlines()[2:-1]]
    assert rows == [
        ["uring", "4.0", "KiB", "1.00", "3.00"],
        ["libaio", "4.0", "KiB", "-", "1.00"],
    ]


def test_nothing_is_left_behind_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(target: io_sweep.Target, setting: io_sweep.Setting, *, seconds: float) -> None:
        assert not list(tmp_path.iterdir())
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(io_sweep, "measure", fail)
    with pytest.raises(SystemExit):
        run("io", tmp_path, "--size", "1MiB")
    assert capsys.readouterr().err.splitlines()[-1].endswith("Input/output error")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing command"),
        (["io"], "Missing argument"),
        (["frob"], "No such command"),
        (["io", "{folder}/none"], "got nothing there"),
        (["io", "{folder}", "--size", "1000TiB"], "of free space"),
        (["io", "{folder}", "--seconds", "0"], "--seconds"),
        (["io", "{folder}", "--seconds", "nan"], "--seconds"),
        (["io", "{folder}", "--seconds", "inf"], "--seconds"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(*(item.format(folder=tmp_path) for item in arguments))
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert len(lines) == 1
    assert says in lines[0]
