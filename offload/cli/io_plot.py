"""The picture of a sweep: one panel an operation, a line a depth, the best as a dashed line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.cli.io_sweep import OPERATIONS, Sample
from offload.cli.shell import text

NO_MATPLOTLIB = "no picture: matplotlib is not installed (pip install 'offload-engine[bench]')."


def draw(
    path: Path, samples: Sequence[Sample], backend: str, sustained: Sequence[float]
) -> str | None:
    """Write a PNG; return why there is none."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return NO_MATPLOTLIB
    num_panels = len(OPERATIONS) + bool(sustained)
    figure = Figure(figsize=(4 * num_panels, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, num_panels, sharey=True)
    panels[0].set_ylabel("GB/s")
    top = max([item.bytes_per_s for item in samples] + list(sustained)) / 1e9
    panels[0].set_ylim(0, 1.05 * top)
    for panel, operation in zip(panels, OPERATIONS, strict=False):
        found = [item for item in samples if item.setting.operation == operation]
        _panel(panel, [item for item in found if item.setting.backend == backend])
        limit = max((item.bytes_per_s for item in found), default=0.0)
        panel.axhline(limit / 1e9, color="0.4", linestyle="--", linewidth=1)
        panel.set_title(f"{operation}, {backend}")
    if sustained:
        panels[-1].plot([rate / 1e9 for rate in sustained])
        panels[-1].set_title("writing on and on")
        panels[-1].set_xlabel("time")
        panels[-1].set_xticks([])
    figure.savefig(path, dpi=120)
    return None


def _panel(panel: Any, samples: Sequence[Sample]) -> None:
    last = {(item.setting.block_bytes, item.setting.depth): item for item in samples}
    for depth in sorted({depth for _, depth in last}):
        line = sorted((block, item.bytes_per_s) for (block, d), item in last.items() if d == depth)
        names = [text(block) for block, _ in line]
        panel.plot(names, [rate / 1e9 for _, rate in line], "o-", label=f"depth {depth}")
    panel.set_xlabel("block")
    panel.legend(fontsize="small")
