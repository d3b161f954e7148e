"""The picture of a plan: state by kind in memory and here, and what bounds the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.cli.io_plot import NO_MATPLOTLIB
from offload.cli.outlook import Outlook
from offload.metrics.bound import WORDS


def draw(path: Path, outlook: Outlook) -> str | None:
    """Write a PNG; return why there is none.  Raises OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return NO_MATPLOTLIB
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    state, tiers, step = figure.subplots(1, 3)
    _state(state, outlook)
    _tiers(tiers, outlook)
    _step(step, outlook)
    figure.suptitle(f"{outlook.name}: {outlook.account.num_params:,} parameters", fontsize=10)
    figure.savefig(path, dpi=120, format="png")
    return None


def _state(panel: Any, outlook: Outlook) -> None:
    columns = {"in memory": outlook.account.in_memory, "here": outlook.account.here}
    for place, (name, kinds) in enumerate(columns.items()):
        bottom = 0.0
        for number, (kind, size) in enumerate(kinds.items()):
            label = kind if place == 0 else None
            panel.bar(name, size / 1e9, bottom=bottom, color=f"C{number}", label=label)
            bottom += size / 1e9
    panel.set_title("state by kind")
    panel.set_ylabel("GB")
    panel.legend(fontsize="small")


def _tiers(panel: Any, outlook: Outlook) -> None:
    plan = outlook.plan
    sizes = {
        "device": plan.device_peak, "host": plan.placement.total_bytes, "disk": plan.space.total,
        "read a step": outlook.read_bytes, "written a step": outlook.written_bytes,
    }  # fmt: skip
    bars = panel.barh(list(sizes), [size / 1e9 for size in sizes.values()], color="C0")
    panel.bar_label(bars, fmt="%.2f", padding=2)
    panel.invert_yaxis()
    panel.margins(x=0.2)
    panel.set_title("GB in each tier")


def _step(panel: Any, outlook: Outlook) -> None:
    terms = outlook.plan.terms
    bars = panel.barh([WORDS[name] for name in terms], list(terms.values()), color="C1")
    panel.bar_label(bars, fmt="%.2f", padding=2)
    step_s = outlook.prediction.step_s
    panel.axvline(step_s, color="0.4", linestyle="--", linewidth=1)
    panel.invert_yaxis()
    panel.margins(x=0.2)
    panel.set_title(f"seconds a step; predicted {step_s:.2f}")
