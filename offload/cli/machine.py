"""What this machine offers, as lines of `name: value` for `offload report`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import aio
from offload import kernels
from offload.cli.place import hazards, look
from offload.cli.shell import text
from offload.profile import find
from offload.threads import Processors, plan_threads

Lines = Iterator[tuple[str, str]]


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`, such as `ext4`; `unknown` without /proc."""
    return look(folder).mount.kind


def storage_lines(folder: Path, probe: aio.Probe) -> Lines:
    first = next(iter(probe.backends))
    why = "" if probe.backend == first else f", since {first} does not work"
    yield "backend", f"{probe.backend or 'none works'}{why}"
    for name, problem in probe.backends.items():
        yield f"  {name}", "works" if problem is None else f"not available: {problem}"
    place = look(folder)
    yield "folder", f"{folder.resolve()}"
    mount = place.mount
    yield "  file system", f"{mount.kind} on {mount.source}, mounted at {mount.point}"
    for drive in place.drives:
        yield "  drive", f"{drive.name}, {drive.model or 'its model cannot be read'}"
    usage = shutil.disk_usage(folder)
    yield "  free space", f"{text(usage.free)} of {text(usage.total)}"
    if probe.path_error:
        yield "  O_DIRECT", f"not tried: {probe.path_error}"
    elif probe.direct:
        yield "  O_DIRECT", f"yes, alignment {probe.alignment} bytes"
    else:
        yield "  O_DIRECT", "refused: through the page cache"
    found = find(folder)
    yield "  profile", f"of {found.date}" if found else "none"
    if found:
        told = f"{len(found.measured)} rates" if found.measured else "not yet (offload plan MODEL)"
        yield "  processors measured", told
    yield "buffers", f"huge pages: {probe.huge_pages}"
    limit = probe.memlock_bytes
    yield "  lockable", "unlimited" if limit is None else text(limit)
    yield "  registered", f"no: {probe.registration}" if probe.registration else "yes"
    yield "files registered", f"no: {probe.file_registration}" if probe.file_registration else "yes"


def processor_lines() -> Lines:
    yield "processor", processor_name()
    yield "kernel variant", f"{kernels.variant()} (of {', '.join(kernels.supported())})"
    here = Processors.here()
    yield "processors", f"{len(here.affinity)} usable of {os.cpu_count()}"
    yield "  cgroup quota", "none" if here.quota is None else f"{here.quota:g} processors"
    yield "  ranks here", f"{here.ranks} (LOCAL_WORLD_SIZE)"
    beside = plan_threads(here, beside_compute=True).update
    yield "update threads", f"{here.usable}, or {beside} beside a model on the processors"
    yield "torch threads", str(torch.get_num_threads())
    if os.environ.get("OMP_NUM_THREADS"):
        yield "  OMP_NUM_THREADS", os.environ["OMP_NUM_THREADS"]


def library_lines() -> Lines:
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.release()}"
    yield "torch", torch.__version__
    if not torch.cuda.is_available():
        yield "CUDA", "no device: training on the processors"
    else:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield f"CUDA {index}", f"{device.name}, {text(device.total_memory)}"


def notes(folder: Path, probe: aio.Probe) -> Iterator[str]:
    """What is missing and what that costs, then what hurts on this path."""
    if probe.backend is None:
        yield "no backend works: nothing can be trained here."
    elif probe.backend != "uring":
        yield f"no io_uring: {probe.backend} needs two to three times the CPU time for transfers."
    if probe.direct is False:
        yield "no O_DIRECT: transfers go through the page cache, with a copy and memory of its own."
    if probe.huge_pages == "none":
        yield (
            "no huge pages: some drives reach a quarter of their rate. Set"
            " /sys/kernel/mm/transparent_hugepage/enabled to madvise."
        )
    if probe.registration and probe.backend == "uring":
        yield "buffers cannot be registered: more CPU time for transfers. Raise ulimit -l."
    if kernels.variant() == "portable":
        yield "portable kernels: updates take several times as long as with vector instructions."
    if os.environ.get("OMP_NUM_THREADS") == "1" and len(os.sched_getaffinity(0)) > 1:
        yield "OMP_NUM_THREADS=1: torch computes on one thread; updates have their own count."
    if find(folder) is None:
        yield f"no profile: block size and depths are guesses. Run: offload-bench io {folder}"
    for module, loss in (
        ("matplotlib", "offload-bench draws no pictures"),
        ("transformers", "from_pretrained cannot build models by name"),
    ):
        if importlib.util.find_spec(module) is None:
            yield f"{module} is not installed: {loss}."
    yield from hazards(look(folder), nodes=device_nodes())


def device_nodes() -> list[int]:
    """NUMA nodes of the CUDA devices, or of the processors this process may use."""
    found: set[int] = set()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            at: Any = torch.cuda.get_device_properties(index)
            bus = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
            with contextlib.suppress(OSError, ValueError):
                node = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
                found |= {node} if node >= 0 else set()
        return sorted(found)
    for processor in os.sched_getaffinity(0):
        places = Path(f"/sys/devices/system/cpu/cpu{processor}").glob("node[0-9]*")
        found |= {int(place.name.removeprefix("node")) for place in places}
    return sorted(found)


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
