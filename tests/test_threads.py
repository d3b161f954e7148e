"""How many threads a process may use, and that an engine starts no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.threads import Processors, cgroup_quota, plan_threads

CHILD = Path(__file__).with_name("threads_child.py")
EIGHT = frozenset(range(8))


def open_engine(folder: Path, settings: dict | None = None, *, prefix=(), **environment: str):
    """What a child process tells of an engine that it opened."""
    command = [*prefix, sys.executable, str(CHILD), str(folder), json.dumps(settings or {})]
    path = str(CHILD.parent)
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("cpus", "quota", "ranks", "usable"),
    [
        (8, None, 1, 8),
        (8, 0.5, 1, 1),
        (8, 2.5, 1, 3),
        (2, 6.0, 1, 2),
        (8, None, 2, 4),
        (8, None, 3, 2),
        (8, 4.0, 2, 2),
        (1, None, 1, 1),
        (2, None, 4, 1),
    ],
)
def test_the_least_of_affinity_and_quota_is_shared_by_the_ranks(cpus, quota, ranks, usable):
    assert Processors(frozenset(range(cpus)), quota, ranks).usable == usable


@pytest.mark.parametrize(("usable", "update"), [(8, 7), (2, 1), (1, 1)])
def test_beside_a_model_the_update_leaves_one_processor_and_yields(usable, update):
    plan = plan_threads(Processors(frozenset(range(usable)), None, 1), beside_compute=True)
    assert (plan.fill, plan.update) == (usable, update)
    assert plan.update_nice > 0


def test_beside_a_gpu_the_update_takes_all_and_yields_to_nobody():
    plan = plan_threads(Processors(EIGHT, None, 1), beside_compute=False)
    assert (plan.fill, plan.update, plan.update_nice) == (8, 8, 0)


def test_what_the_user_says_holds():
    plan = plan_threads(Processors(EIGHT, None, 1), beside_compute=True, update_threads=3)
    assert plan.update == 3
    plan = plan_threads(Processors(EIGHT, None, 1), beside_compute=True, update_cpus=(4, 6))
    assert (plan.update, plan.update_cpus) == (2, (4, 6))


def test_processors_of_others_are_refused():
    with pytest.raises(ConfigError, match=r"update_cpus: expected processors.*got 9"):
        plan_threads(Processors(EIGHT, None, 1), beside_compute=True, update_cpus=(1, 9))


def place(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup").write_text(text)
    return folder / "cgroup"


def write_quota(folder: Path, version: int, quota: str, period: str = "100000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text("-1" if quota == "max" else quota)
        (folder / "cpu.cfs_period_us").write_text(period)


@pytest.mark.parametrize(
    ("version", "line", "mount"), [(2, "0::/a/b", ""), (1, "4:cpu,cpuacct:/a/b", "cpu")]
)
def test_the_tightest_quota_up_to_the_root_counts(version, line, mount, tmp_path):
    process, root = place(tmp_path / "proc", f"7:memory:/m\n{line}\n"), tmp_path / "sys"
    assert cgroup_quota(process, root) is None
    write_quota(root / mount / "a/b", version, "max")
    assert cgroup_quota(process, root) is None
    write_quota(root / mount, version, "400000")  # as a container sees its own
    assert cgroup_quota(process, root) == 4.0
    write_quota(root / mount / "a", version, "50000")
    assert cgroup_quota(process, root) == 0.5
    assert Processors.here({}, process=process, root=root).usable == 1


def test_ranks_come_from_the_launcher(tmp_path):
    nothing = tmp_path / "none"
    for text, ranks in (("2", 2), ("", 1), ("many", 1)):
        found = Processors.here({"LOCAL_WORLD_SIZE": text}, process=nothing, root=nothing)
        assert found.ranks == ranks


def test_one_omp_thread_does_not_make_the_update_single(tmp_path):
    usable = len(os.sched_getaffinity(0))
    told = open_engine(tmp_path, OMP_NUM_THREADS="1")
    assert told["torch"] == 1
    assert told["niced"] == max(1, usable - 1)
    assert f"{max(1, usable - 1)} update, {usable} fill" in told["described"]


def test_on_one_processor_there_is_one_update_thread(tmp_path):
    cpu = min(os.sched_getaffinity(0))
    told = open_engine(tmp_path, prefix=("taskset", "-c", str(cpu)))
    assert told["niced"] == 1
    assert "1 update, 1 fill" in told["described"]


def test_two_ranks_share_the_processors_and_pinning_is_for_updates_alone(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    told = open_engine(tmp_path, {"update_cpus": cpus[-1:]}, LOCAL_WORLD_SIZE="2")
    assert f"1 update, {max(1, len(cpus) // 2)} fill" in told["described"]
    assert told["cpus"] == [cpus[-1:]]
    assert told["own_cpus"] == cpus


def cpu_controller() -> tuple[int, Path] | None:
    """Version and mount of a controller in which this process may make a group."""
    for version, mount, file in (
        (2, Path("/sys/fs/cgroup"), "cgroup.controllers"),
        (1, Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us"),
    ):
        with suppress(OSError):
            if version == 1 or "cpu" in (mount / file).read_text().split():
                (mount / file).read_text()
                if os.access(mount, os.W_OK):
                    return version, mount
    return None


@pytest.fixture
def half_a_core():
    """A cgroup of its own that may use half a processor, of whichever version is mounted."""
    found = cpu_controller()
    if found is None:
        pytest.skip("no cgroup can be made here: it needs root and a writable cpu controller")
    version, mount = found
    folder = mount / f"offload-test-{os.getpid()}"
    folder.mkdir()
    try:
        if not (folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).exists():
            pytest.skip(f"no group of {mount} has a cpu controller of its own here")
        write_quota(folder, version, "50000")
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.slow
def test_half_a_core_by_quota_is_one_thread(half_a_core, tmp_path):
    enter = f'echo $$ > {half_a_core}/cgroup.procs && exec "$0" "$@"'
    told = open_engine(tmp_path, prefix=("sh", "-c", enter))
    assert told["niced"] == 1
    assert "1 update, 1 fill" in told["described"]
