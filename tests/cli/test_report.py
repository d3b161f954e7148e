"""offload report: what would be used here, told by what was tried."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aio
from offload import kernels
from offload.cli import machine, main, place, shell
from offload.profile import FILE_NAME, Profile, encode


def test_the_report_names_backend_variant_and_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.parse(main.command, ["report", str(tmp_path)])
    out = capsys.readouterr().out.splitlines()
    lines = [line.strip().split("  ", 1) for line in out if not line.startswith("note: ")]
    found = {name: value.strip() for name, value in lines}
    probe = aio.probe(tmp_path)
    assert found["backend"] == probe.backend
    assert found["folder"].startswith(str(tmp_path))
    assert found["kernel variant"].startswith(kernels.variant())
    assert found["torch"] == torch.__version__
    assert {"uring", "libaio", "threads"} <= set(found)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["report"], ["--help"]])
def test_a_full_disk_behind_the_output_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "offload.cli.main", *arguments]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr == (
        "offload: standard output cannot be written: No space left on device.\n"
    )


def test_the_file_system_is_that_of_the_nearest_mount_point() -> None:
    assert machine.file_system(Path("/proc/self")) == "proc"
    assert machine.file_system(Path("/proc/self/fd")) == "proc"
    assert machine.file_system(Path("/")) != "proc"


def changed(folder: Path, **changes: object) -> aio.Probe:
    """What was tried here, with other answers."""
    return replace(aio.probe(folder), **changes)


def test_a_backend_that_does_not_work_says_why(tmp_path: Path) -> None:
    real = aio.probe(tmp_path)
    backends = {**real.backends, "uring": "EPERM: Operation not permitted", "libaio": None}
    probe = changed(tmp_path, backends=backends, registration="ENOMEM", file_registration="EMFILE")
    found = dict(machine.storage_lines(tmp_path, probe))
    assert found["  uring"] == "not available: EPERM: Operation not permitted"
    assert found["backend"] == "libaio, since uring does not work"
    assert found["  registered"] == "no: ENOMEM"
    assert found["files registered"] == "no: EMFILE"
    assert "libaio needs two to three times the CPU time" in "\n".join(
        machine.notes(tmp_path, probe)
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"direct": False}, "no O_DIRECT: transfers go through the page cache"),
        ({"huge_pages": "none"}, "transparent_hugepage/enabled"),
        ({"registration": "ENOMEM"}, "Raise ulimit -l"),
        ({"backends": {"uring": "x", "libaio": "y"}}, "nothing can be trained"),
    ],
)
def test_what_is_missing_tells_what_it_costs(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    good = {"direct": True, "huge_pages": "transparent", "registration": None,
            "backends": {"uring": None}}  # fmt: skip
    without = list(machine.notes(tmp_path, changed(tmp_path, **good)))
    found = list(machine.notes(tmp_path, changed(tmp_path, **good | changes)))
    assert not any(says in line for line in without)
    assert any(says in line for line in found)


def test_a_missing_profile_is_told_and_one_that_is_there_has_its_date(tmp_path: Path) -> None:
    probe = aio.probe(tmp_path)
    missing = f"Run: offload-bench io {tmp_path}"
    assert any(line.endswith(missing) for line in machine.notes(tmp_path, probe))
    profile = Profile(
        path="/x", date="2026-01-02T03:04:05", backend="uring", block_bytes=4096, read_depth=1,
        write_depth=1, read_bytes_per_s=1, write_bytes_per_s=1, mixed_bytes_per_s=1,
    )  # fmt: skip
    (tmp_path / FILE_NAME).write_text(encode(profile))
    assert not any(line.endswith(missing) for line in machine.notes(tmp_path, probe))
    assert dict(machine.storage_lines(tmp_path, probe))["  profile"] == "of 2026-01-02T03:04:05"


def mounts(folder: Path, kind: str, *, options: str = "rw", source: str = "none") -> Path:
    """A /proc/self/mountinfo in which `folder` is a mount point."""
    point = str(folder).replace(" ", r"\040")
    file = folder.parent / "mountinfo"
    file.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:9 / {point} {options} shared:1 - {kind} {source} rw\n"
    )
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a drive"
    made.mkdir()
    return made


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("btrfs", "chattr +C"),
        ("zfs", "copies on write"),
        ("overlay", "Mount a volume of the host"),
        ("tmpfs", "this is memory"),
        ("nfs4", "network mount"),
        ("fuse.sshfs", "another process"),
        ("ecryptfs", "refuses O_DIRECT"),
    ],
)
def test_a_file_system_that_hurts_says_how(kind: str, says: str, folder: Path) -> None:
    found = place.look(folder, mounts=mounts(folder, kind), system=folder)
    assert found.mount.kind == kind
    assert found.mount.point == str(folder)
    assert [says in line for line in place.hazards(found)] == [True]


def test_a_usual_file_system_hurts_nobody_and_a_sync_mount_does(folder: Path) -> None:
    usual = place.look(folder, mounts=mounts(folder, "xfs"), system=folder)
    assert list(place.hazards(usual)) == []
    synced = place.look(folder, mounts=mounts(folder, "xfs", options="rw,sync"), system=folder)
    assert ["mounted with sync" in line for line in place.hazards(synced)] == [True]


def test_drives_are_found_below_partitions_encryption_and_raid(folder: Path) -> None:
    number = os.stat(folder).st_dev
    if os.major(number) == 0:
        pytest.skip("the test folder is on no block device")
    system = folder / "sys"
    blocks = system / "devices"
    top = blocks / "dm-0"
    (top / "dm").mkdir(parents=True)
    (top / "dm" / "uuid").write_text("CRYPT-LUKS2-1-x\n")
    (top / "slaves").mkdir()
    for name, model, rotational in (("nvme0n1", "Fast  One\n", "0"), ("sdb", "Slow One\n", "1")):
        disk = blocks / name
        for inner, value in (
            ("device/model", model), ("device/device/numa_node", "1\n"),
            ("queue/rotational", rotational), ("part1/partition", "1"),
        ):  # fmt: skip
            (disk / inner).parent.mkdir(parents=True, exist_ok=True)
            (disk / inner).write_text(value)
        (top / "slaves" / f"{name}p1").symlink_to(disk / "part1")
    (system / "dev" / "block").mkdir(parents=True)
    here = system / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    here.symlink_to(top)
    found = place.look(folder, mounts=mounts(folder, "ext4"), system=system)
    assert [(drive.name, drive.model) for drive in found.drives] == [
        ("nvme0n1", "Fast One"),
        ("sdb", "Slow One"),
    ]
    told = list(place.hazards(found, nodes=[0]))
    for says in ("dm-crypt", "sdb is a spinning disk", "nvme0n1 is on NUMA node 1, computing on 0"):
        assert sum(says in line for line in told) == 1
    assert not any("NUMA" in line for line in place.hazards(found, nodes=[0, 1]))


def test_what_cannot_be_read_is_not_guessed(folder: Path) -> None:
    found = place.look(folder, mounts=folder / "none", system=folder / "none")
    assert (found.mount.kind, found.drives, found.encrypted) == ("unknown", (), False)
    assert list(place.hazards(found)) == []
