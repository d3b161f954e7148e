"""What this machine offers, as lines of `name: value` for `offload report`."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

import aio
from offload import kernels
from offload.cli.shell import text


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`, such as `ext4`; `unknown` without /proc."""
    real = folder.resolve()
    kind, longest = "unknown", -1
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return kind
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4].encode().decode("unicode_escape"))
        if real.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = right.split()[0], len(point.parts)
    return kind


def storage_lines(folder: Path) -> Iterator[tuple[str, str]]:
    probe = aio.probe(folder)
    yield "backend", probe.backend or "none works"
    for name, problem in probe.backends.items():
        yield f"  {name}", "works" if problem is None else f"not available: {problem}"
    yield "folder", f"{folder.resolve()} ({file_system(folder)})"
    usage = shutil.disk_usage(folder)
    yield "  free space", f"{text(usage.free)} of {text(usage.total)}"
    if probe.path_error:
        yield "  O_DIRECT", f"not tried: {probe.path_error}"
    elif probe.direct:
        yield "  O_DIRECT", f"yes, alignment {probe.alignment} bytes"
    else:
        yield "  O_DIRECT", "refused: through the page cache"
    yield "buffers", f"huge pages: {probe.huge_pages}"
    limit = probe.memlock_bytes
    yield "  lockable", "unlimited" if limit is None else text(limit)
    yield "  registered", f"no: {probe.registration}" if probe.registration else "yes"


def processor_lines() -> Iterator[tuple[str, str]]:
    yield "processor", processor_name()
    yield "kernel variant", f"{kernels.variant()} (of {', '.join(kernels.supported())})"
    usable = len(os.sched_getaffinity(0))
    yield "processors", f"{usable} usable of {os.cpu_count()}"
    yield "torch threads", str(torch.get_num_threads())
    if os.environ.get("OMP_NUM_THREADS"):
        yield "  OMP_NUM_THREADS", os.environ["OMP_NUM_THREADS"]


def library_lines() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.release()}"
    yield "torch", torch.__version__
    if not torch.cuda.is_available():
        yield "CUDA", "no device"
    else:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield f"CUDA {index}", f"{device.name}, {text(device.total_memory)}"


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
