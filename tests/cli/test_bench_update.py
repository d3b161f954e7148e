"""offload-bench update: every variant beside the limit, in rates that follow from the times."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from offload import kernels
from offload.cli import bench, io_plot, shell, update_bench, update_sweep
from offload.cli.update_memory import Streams, Timing

needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


def run(*arguments: object) -> None:
    small = ("--num-elems", 4096, "--rounds", 1)
    shell.parse(bench.command, ["update", *map(str, (*small, *arguments))])


@needs_cc
def test_every_variant_and_thread_count_is_timed_beside_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = kernels.variant()
    run("--threads", 1, "--threads", 2, "--json")
    said = capsys.readouterr()
    assert "1 threads:" not in said.err  # no bar without a terminal
    record = json.loads(said.out)
    assert [table["threads"] for table in record["tables"]] == [1, 2]
    for table in record["tables"]:
        rows = {row["job"]: row for row in table["rows"]}
        kinds = {"mixed": 26, "fp32": 28, "mixed, bf16 state": 18, "mixed, int8 state": 14.125}
        for kind, num_bytes in kinds.items():
            names = [f"limit, {kind}", *(f"offload {v}, {kind}" for v in kernels.supported())]
            for name in names:
                row = rows[name]
                assert row["bytes_per_s"] == pytest.approx(num_bytes * row["elems_per_s"])
                assert row["of_limit"] > 0
        best = kernels.supported()[0]
        for name, num_bytes in (("sgd", 10), ("sgd momentum", 18), ("lion", 18), ("adagrad", 18)):
            row = rows[f"{name} {best}, mixed"]
            assert row["bytes_per_s"] == pytest.approx(num_bytes * row["elems_per_s"])
            assert row["of_limit"] > 0
    assert kernels.variant() == before


def test_no_job_leaves_memory_on_which_another_computes_nan() -> None:
    at = Streams(4096, 0)
    at.reset()
    with kernels.Threads(1) as threads:
        jobs = update_sweep.optimizer_jobs(at, threads, kernels.supported()[0])
        for job in [*jobs.values()] * 3:
            job()
        assert at.exp_avg_sq.min() >= 0
        for job in update_sweep.our_jobs(at, threads, kernels.supported()[:1]).values():
            job()
    assert at.weight16.isfinite().all()
    assert at.weight.isfinite().all()


def test_a_share_of_the_limit_is_taken_within_its_round() -> None:
    found = {
        "limit, mixed": [Timing(1.0, 1.0), Timing(10.0, 1.0), Timing(1.0, 1.0)],
        "limit, mixed, ahead": [Timing(2.0, 2.0), Timing(8.0, 0.5), Timing(2.0, 2.0)],
        "offload avx2, mixed": [Timing(2.0, 4.0), Timing(16.0, 1.0), Timing(2.0, 2.0)],
    }
    row = update_sweep.row_of(found, "offload avx2, mixed", 1000)
    assert (row["of_limit"], row["of_limit_cpu"]) == (0.5, 0.5)
    assert (row["elems_per_s"], row["slowest_elems_per_s"]) == (500, 62.5)


def test_without_a_compiler_rates_are_shown_and_the_lack_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run("--threads", 1)
    said = capsys.readouterr()
    assert update_bench.NO_LIMIT in said.err
    assert "limit," not in said.out
    rows = [line for line in said.out.splitlines() if line.startswith("offload ")]
    assert len(rows) == 4 * len(kernels.supported())
    assert all(line.endswith(" -") for line in rows)


def test_the_picture_is_drawn_or_its_lack_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--threads", 1, "--picture", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("--threads", 1, "--picture", tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()
    assert io_plot.NO_MATPLOTLIB in capsys.readouterr().err


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run("--threads", 0)
    assert left.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
