"""Buffers and files by themselves."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import aio

HUGE = 2 << 20


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


def test_a_buffer_is_zeroed_and_starts_on_a_huge_page() -> None:
    for num_bytes in (1, 4097, HUGE, 3 * HUGE + 5):
        with aio.Buffer(num_bytes) as buffer:
            assert buffer.address % HUGE == 0
            assert len(buffer) == len(buffer.view) == num_bytes
            assert not np.frombuffer(buffer.view, np.uint8).any()
            buffer.view[-1] = 7
            assert np.frombuffer(buffer.view, np.uint8)[-1] == 7


def test_a_large_buffer_says_truly_whether_it_has_huge_pages() -> None:
    with aio.Buffer(8 * HUGE) as buffer:
        advised = "never" not in _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
        assert buffer.huge in (("hugetlb", "transparent", "none") if advised else ("none",))
        kib = _anon_huge_kib(buffer.address)
        if buffer.huge != "hugetlb":
            assert (kib * 1024 >= len(buffer) // 2) is (buffer.huge == "transparent")


def _chosen(path: Path) -> str:
    text = path.read_text() if path.exists() else "[never]"
    return text[text.index("[") : text.index("]")]


def _anon_huge_kib(address: int) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1])
    return 0


def test_a_slice_keeps_the_memory_and_the_last_one_frees_it() -> None:
    buffer = aio.Buffer(HUGE)
    address = buffer.address
    array = np.frombuffer(buffer.view[4096:8192], np.float32)
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.view
    gc.collect()
    assert mapped(address)
    assert not array.any()
    del array
    gc.collect()
    assert not mapped(address)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_buffer_of_nothing_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="size > 0"):
        aio.Buffer(num_bytes)


def test_memory_that_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"expected .* bytes of memory"):
        aio.Buffer(1 << 50)


def test_modes_open_and_refuse_as_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with pytest.raises(FileNotFoundError):
        aio.File(path)
    with aio.File(path, "x+", size=10000) as file:
        assert (file.size, file.closed) == (10000, False)
        assert os.stat(path).st_blocks * 512 >= 10000  # not sparse
        file.sync()
    file.close()
    assert file.closed
    for call in (file.sync, file.fileno, lambda: file.size):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(FileExistsError):
        aio.File(path, "x+")
    with pytest.raises(ValueError, match="'r', 'r\\+' or 'x\\+'"):
        aio.File(path, "w")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"drive": -1}, ValueError), ({"drive": 2**32}, ValueError), ({"size": -1}, ValueError),
        ({"size": 2**63}, OverflowError), ({"size": 2**62}, OSError),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, options: dict[str, int], error: type[Exception]
) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(error):
        aio.File(tmp_path / "f", "x+", **options)
    assert os.listdir("/proc/self/fd") == before
    assert list(tmp_path.iterdir()) == []


def test_without_a_second_descriptor_nothing_is_left(tmp_path: Path) -> None:
    code = """
import errno, os, resource, sys
import aio
first = os.dup(0)
os.close(first)
resource.setrlimit(resource.RLIMIT_NOFILE, (first + 1, first + 1))
try:
    aio.File(sys.argv[1], "x+")
except OSError as error:
    assert error.errno == errno.EMFILE
os.dup(0)  # the only number there is
assert not os.path.exists(sys.argv[1])
print("refused")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "f")],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_a_disk_file_is_direct_unless_told_otherwise(tmp_path: Path) -> None:
    with aio.File(tmp_path / "f", "x+") as file, aio.File(tmp_path / "f", direct=False) as other:
        assert file.direct
        assert file.alignment >= 512
        assert file.alignment & (file.alignment - 1) == 0
        assert not other.direct


def test_descriptors_are_not_inherited_by_programs(tmp_path: Path) -> None:
    show = """
import os
for number in range(64):
    place = f"/proc/self/fd/{number}"
    if os.path.exists(place):
        print(number, os.readlink(place))
"""
    with aio.File(tmp_path / "secret", "x+"), aio.Queue("auto"):
        out = subprocess.run(
            [sys.executable, "-c", show],
            close_fds=False,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert "1 pipe:" in out
    assert "secret" not in out
    assert "io_uring" not in out
    assert "eventfd" not in out


def test_a_write_to_a_file_opened_for_reading_fails_clearly(queue: aio.Queue, path: Path) -> None:
    path.write_bytes(b"keep" * 1024)
    with aio.File(path) as file, pytest.raises(aio.IOFailed, match=r"r\+") as failed:
        queue.write(file, b"x" * 4096, 0).wait()
    assert failed.value.errno == errno.EBADF
    assert path.read_bytes() == b"keep" * 1024


def test_a_closed_file_fails_at_the_ticket(queue: aio.Queue, path: Path) -> None:
    file = aio.File(path, "x+", size=4096)
    file.close()
    with pytest.raises(aio.IOFailed, match="closed") as failed:
        queue.read(file, bytearray(4096), 0).wait()
    assert failed.value.errno == errno.EBADF


def test_memory_that_is_not_there_fails_at_the_ticket(queue: aio.Queue, path: Path) -> None:
    with aio.File(path, "x+", size=4096) as file:
        with pytest.raises(aio.IOFailed) as failed:
            queue.read(file, (4096, 4096), 0).wait()
        assert failed.value.errno == errno.EFAULT
        queue.read(file, bytearray(4096), 0).wait()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(where)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_is_told_when_reserving_and_leaves_nothing(small: Path) -> None:
    with pytest.raises(OSError, match="expected 2097152 bytes, got ENOSPC") as failed:
        aio.File(small / "f", "x+", size=2 << 20)
    assert failed.value.errno == errno.ENOSPC
    assert list(small.iterdir()) == []


def test_a_full_disk_is_told_at_the_ticket_and_the_queue_goes_on(
    queue: aio.Queue, small: Path
) -> None:
    with aio.File(small / "f", "x+") as file:
        with pytest.raises(aio.IOFailed, match="Free space") as failed:
            queue.write(file, bytes(4 << 20), 0).wait()
        assert failed.value.errno == errno.ENOSPC
        assert 0 < failed.value.done < 4 << 20
        queue.read(file, bytearray(4096), 0).wait()
