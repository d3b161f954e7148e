"""Hold a disk at a fixed rate, so that end-to-end runs can be repeated.

A cgroup v1 `blkio` group with separate read and write limits for the disk below a folder.
Needs root. Reads and writes have budgets of their own, so overlapping them shows. Never for tests.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


class ThrottleUnavailable(RuntimeError):
    """The machine does not let us hold the disk; the message says why."""


def _blkio_root() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "blkio" in options.split(","):
            return Path(mount)
    raise ThrottleUnavailable("no cgroup v1 blkio mount in /proc/mounts: run without --held")


def disk_number(folder: Path) -> str:
    """MAJOR:MINOR of the whole disk that holds `folder` (a partition's limits are the disk's)."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path(f"/sys/dev/block/{number}").resolve()
    if (entry / "partition").exists():
        return (entry.parent / "dev").read_text().strip()
    if not entry.exists():
        raise ThrottleUnavailable(f"{folder} is not on a block device ({number}): choose another")
    return number


class HeldDisk:
    """A group whose members share `bytes_per_s` of reads and as much of writes."""

    def __init__(self, folder: Path, bytes_per_s: int) -> None:
        self._number = disk_number(folder)
        self._group = _blkio_root() / f"offload-bench-{os.getpid()}"
        try:
            self._group.mkdir()
            self.hold(folder, bytes_per_s)
        except OSError as error:
            self.close()
            raise ThrottleUnavailable(f"cannot hold disk {self._number}: {error}") from error

    def hold(self, folder: Path, bytes_per_s: int) -> None:
        """The same for another disk; raises OSError."""
        for side in ("read", "write"):
            limit = self._group / f"blkio.throttle.{side}_bps_device"
            limit.write_text(f"{disk_number(folder)} {bytes_per_s}")

    def add(self, pid: int) -> None:
        """Move a process, and the threads it starts later, into the group."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def served_bytes(self) -> tuple[int, int]:
        """Bytes read and written that passed the limit so far."""
        served = {"Read": 0, "Write": 0}
        for line in (self._group / "blkio.throttle.io_service_bytes").read_text().splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[0] == self._number and fields[1] in served:
                served[fields[1]] = int(fields[2])
        return served["Read"], served["Write"]

    def close(self) -> None:
        """Remove the group; its members must have ended."""
        for _ in range(50):
            try:
                self._group.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # a member is still on its way out
                time.sleep(0.1)
        raise ThrottleUnavailable(f"group {self._group} still has members: remove it by hand")

    def __enter__(self) -> HeldDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChannelSampler:
    """Count the windows in which the held disk served reads, and those in which it served writes.

    A limit refunds idle times shorter than its slice, so a step can meet its floor and still leave
    bubbles: the share of busy windows shows them. Only the thread writes the counts; whoever
    follows the child's progress sets `active`.
    """

    WINDOW_S = 0.1

    def __init__(self, disk: HeldDisk) -> None:
        self.active = False
        self.windows = 0
        self.busy = [0, 0]
        self._disk = disk
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before, was_active = self._disk.served_bytes(), False
        while not self._stop.wait(self.WINDOW_S):
            now = self._disk.served_bytes()
            if self.active and was_active:
                self.windows += 1
                for side in (0, 1):
                    self.busy[side] += now[side] > before[side]
            before, was_active = now, self.active

    def shares(self) -> dict[str, float]:
        """Busy share of the read and of the write channel, 0 to 1."""
        windows = max(1, self.windows)
        return {"read": self.busy[0] / windows, "write": self.busy[1] / windows}

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
