"""offload-bench io: measures what it says, leaves nothing behind, names the best setting."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from offload.cli import bench, io_sweep, shell

PIECE = 64 << 10


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_sweep, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(io_sweep, "LEAST_FILE_BYTES", 4 * PIECE)
    monkeypatch.setattr(io_sweep, "BLOCKS", (4096, 16384))
    monkeypatch.setattr(io_sweep, "DEPTHS", (2, 4))


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


def test_json_holds_every_setting_and_the_best_of_each_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("io", tmp_path, "--size", "1MiB", "--seconds", "1e-9", "--json")
    record = json.loads(capsys.readouterr().out)
    settings = {tuple(list(row.values())[:4]) for row in record["samples"]}
    backends = {row["backend"] for row in record["samples"]}
    assert "threads" in backends
    assert len(settings) == len(record["samples"]) == 3 * len(backends) * 2 * 2
    for operation, best in record["best"].items():
        rows = [row for row in record["samples"] if row["operation"] == operation]
        assert best["bytes_per_s"] == max(row["bytes_per_s"] for row in rows)
    assert not list(tmp_path.iterdir())


def test_the_table_names_the_best_setting() -> None:
    text = bench.table([sample(depth=2), sample(depth=4, rate=3), sample(backend="libaio", depth=2),
                        sample(backend="libaio", depth=4)])  # fmt: skip
    assert text.splitlines()[-1] == "best: 3.00 GB/s with uring, blocks of 4.0 KiB, depth 4"
    rows = [line.split() for line in text.splitlines()[2:-1]]
    assert rows == [
        ["uring", "4.0", "KiB", "1.00", "3.00"],
        ["libaio", "4.0", "KiB", "1.00", "1.00"],
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
