"""What lies under a folder: mount, file system, drives, and what is known to hurt there.

folder -> mount point -> source device -> (LVM, RAID, dm-crypt) -> drives with a model
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
SYS = Path("/sys")
COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs")
IN_MEMORY = ("tmpfs", "ramfs")
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
)
ENCRYPTED = ("ecryptfs", "fuse.gocryptfs", "fuse.encfs", "fuse.cryfs")


@dataclass(frozen=True)
class Mount:
    """The mount that holds a folder."""

    point: str
    kind: str  # such as "ext4"
    source: str  # such as "/dev/nvme0n1p2"
    options: tuple[str, ...]


@dataclass(frozen=True)
class Drive:
    """A block device without slaves."""

    name: str  # such as "nvme0n1"
    model: str | None
    rotational: bool
    usb: bool
    numa_node: int | None


@dataclass(frozen=True)
class Place:
    """What was found out; nothing here is guessed."""

    mount: Mount
    drives: tuple[Drive, ...]  # empty: not known
    encrypted: bool  # dm-crypt below the file system


def look(folder: Path, *, mounts: Path = MOUNTS, system: Path = SYS) -> Place:
    """Follow the folder down to its drives."""
    real = folder.resolve()
    mount = _mount_of(real, mounts)
    with contextlib.suppress(OSError, ValueError):
        number = _device_number(real, mount)
        blocks = list(_below((system / "dev" / "block" / number).resolve(strict=True)))
        encrypted = any(_read(block / "dm" / "uuid").startswith("CRYPT-") for block in blocks)
        drives = tuple(_drive(block) for block in blocks if not _slaves(block))
        return Place(mount, drives, encrypted)
    return Place(mount, (), False)


def _mount_of(real: Path, mounts: Path) -> Mount:
    found, longest = Mount("/", "unknown", "unknown", ()), -1
    lines: Sequence[str] = ()
    with contextlib.suppress(OSError):
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        point = _unescape(fields[4])
        if real.is_relative_to(point) and len(Path(point).parts) >= longest:
            options = tuple({*fields[5].split(","), *(tail[2] if tail[2:] else "").split(",")})
            found = Mount(point, tail[0], _unescape(tail[1]), options)
            longest = len(Path(point).parts)
    return found


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _device_number(real: Path, mount: Mount) -> str:
    """MAJOR:MINOR; file systems that span devices (btrfs) have one only in their source."""
    device = os.stat(real).st_dev
    if os.major(device) == 0:
        device = os.stat(mount.source).st_rdev
    return f"{os.major(device)}:{os.minor(device)}"


def _below(block: Path) -> Iterator[Path]:
    """The device and all that it is made of; a partition stands for its disk."""
    if (block / "partition").exists():
        block = block.parent
    yield block
    for slave in _slaves(block):
        yield from _below(slave.resolve())


def _slaves(block: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted((block / "slaves").iterdir())
    return []


def _drive(block: Path) -> Drive:
    model = " ".join(_read(block / "device" / "model").split()) or None
    # nvme0n1/device is the controller, whose own device is on the bus
    nodes = [_read(block / "device" / up / "numa_node") for up in (".", "device", "../..")]
    node = next((int(text) for text in nodes if re.fullmatch(r"\d+", text)), None)
    rotational = _read(block / "queue" / "rotational") == "1"
    return Drive(block.name, model, rotational, "/usb" in str(block), node)


def _read(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip()
    return ""


def hazards(place: Place, *, nodes: Sequence[int] = ()) -> Iterator[str]:
    """What is known to hurt on this path.  `nodes`: NUMA nodes of what computes."""
    kind = place.mount.kind
    if kind in COPY_ON_WRITE:
        cure = " (chattr +C on the empty folder)" if kind == "btrfs" else ""
        yield (
            f"{kind} copies on write: reserved space does not hold, and every step fragments the"
            f" files. Use ext4 or xfs, or turn it off for this folder{cure}."
        )
    elif kind == "overlay":
        yield "overlay: a container's own layer, slow and lost with it. Mount a volume of the host."
    elif kind in IN_MEMORY:
        yield f"{kind}: this is memory, not a drive: it counts against what training needs."
    elif kind in ENCRYPTED:
        yield f"{kind} encrypts in a process of its own and refuses O_DIRECT: use another path."
    elif kind in NETWORK:
        yield f"{kind}: a network mount: its latency bounds each step. Use a local drive."
    elif kind.startswith("fuse"):
        yield f"{kind}: every transfer passes through another process. Use a local file system."
    if place.encrypted:
        yield "dm-crypt: every byte is encrypted by the processors that also compute."
    if "sync" in place.mount.options or "dirsync" in place.mount.options:
        yield f"{place.mount.point} is mounted with sync: every write waits for the drive."
    for drive in place.drives:
        if drive.rotational and not drive.name.startswith(("vd", "xvd", "loop")):
            yield f"{drive.name} is a spinning disk: use a solid state drive."
        if drive.usb:
            yield f"{drive.name} is connected by USB, which is slower than the drive."
        if nodes and drive.numa_node is not None and drive.numa_node not in nodes:
            listed = ", ".join(map(str, nodes))
            yield (
                f"{drive.name} is on NUMA node {drive.numa_node}, computing on {listed}: transfers"
                " cross the link between sockets. Use numactl, or a drive of that node."
            )
