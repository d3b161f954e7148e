"""From the runs of bench_step to one row per engine, a text table, and result files.

Figures of a round come from its steps after the warm-up; figures of an engine are medians over
rounds; a ratio is the median of per-round ratios, since the machine's speed moves between rounds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from disk_rate import floor_s
from step_run import Run

DIRTY_SHARE = 0.1
Row = dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """What the figures are relative to."""

    num_params: int
    warmup: int
    num_cpus: int
    loss_tolerance: float = 1e-3


def is_clean(step: dict[str, Any], num_cpus: int) -> bool:
    """False where somebody else took more than a tenth of the CPU capacity during the step."""
    lost = step["foreign_s"] + step["steal_s"]
    return bool(lost <= DIRTY_SHARE * step["seconds"] * num_cpus)


def round_figures(run: Run, terms: Terms) -> dict[str, float]:
    """Medians over the steps of one run, clean ones if at least three are."""
    measured = run.steps[terms.warmup :]
    clean = [step for step in measured if is_clean(step, terms.num_cpus)]
    steps = clean if len(clean) >= 3 else measured
    figures = {
        key: median(step[key] for step in steps)
        for key in ("seconds", "read_bytes", "write_bytes", "cpu_s", "foreign_s", "steal_s")
    }
    total = sum(step["seconds"] for step in measured) + run.events["drained"]["seconds"]
    figures["mean_s"] = total / len(measured)
    figures["clean"] = len(clean) / len(measured)
    for key in steps[0]["counted"]:
        figures[f"counted_{key}"] = median(step["counted"][key] for step in steps)
    if run.rates:
        figures["floor_s"] = floor_s(figures["read_bytes"], figures["write_bytes"], run.rates)
        figures["over_floor"] = figures["seconds"] / figures["floor_s"]
    for side, share in run.busy.items():
        figures[f"busy_{side}"] = share
    base = run.events["imported"]["memory_bytes"]
    figures["peak_steps_bytes"] = run.peaks.get("steps", base) - base
    figures["peak_build_bytes"] = run.peaks.get("build", base) - base
    figures["build_s"] = run.events["built"]["seconds"]
    return figures


def engine_row(name: str, runs: list[Run], terms: Terms) -> Row:
    """One engine over all rounds: medians, the spread of its step time, its versions."""
    rounds = {run.round: round_figures(run, terms) for run in runs if not run.error}
    row: Row = {"engine": name, "rounds": len(rounds)}
    row["errors"] = [run.error for run in runs if run.error]
    if not rounds:
        return row
    keys = next(iter(rounds.values())).keys()
    row.update({key: median(figures[key] for figures in rounds.values()) for key in keys})
    row["seconds_by_round"] = {index: figures["seconds"] for index, figures in rounds.items()}
    for side in ("read", "write"):
        row[f"{side}_bytes_per_param"] = row[f"{side}_bytes"] / terms.num_params
        if f"counted_{side}_bytes" in row:
            counted = row[f"counted_{side}_bytes"]
            row[f"counted_{side}_bytes_per_param"] = counted / terms.num_params
    first = next(run for run in runs if not run.error)
    row["losses"] = [step["loss"] for step in first.steps]
    row["version"] = first.events["imported"]["version"]
    return row


def add_ratios(rows: list[Row]) -> None:
    """Set each row's `ratio_to`: step time over every other engine's, in the same round."""
    for row in rows:
        mine = row.get("seconds_by_round", {})
        row["ratio_to"] = {}
        for other in rows:
            theirs = other.get("seconds_by_round", {})
            both = [mine[index] / theirs[index] for index in mine if index in theirs]
            if other is not row and both:
                row["ratio_to"][other["engine"]] = median(both)


def add_loss_differences(rows: list[Row], tolerance: float) -> bool:
    """Compare every engine's losses with those of the first row; True if all agree."""
    reference = next((row["losses"] for row in rows if "losses" in row), [])
    agree = True
    for row in rows:
        if "losses" in row:
            pairs = zip(row["losses"], reference, strict=True)
            row["loss_difference"] = max(abs(mine - theirs) for mine, theirs in pairs)
            agree &= row["loss_difference"] <= tolerance
    return agree


def summarise(runs: list[Run], terms: Terms) -> tuple[list[Row], bool]:
    """Rows in the order of first appearance, and whether all losses agree."""
    names = list(dict.fromkeys(run.engine for run in runs))
    rows = [engine_row(name, [run for run in runs if run.engine == name], terms) for name in names]
    add_ratios(rows)
    return rows, add_loss_differences(rows, terms.loss_tolerance)


def _number(row: Row, key: str, *, scale: float = 1.0, digits: int = 2) -> str:
    return f"{row[key] / scale:.{digits}f}" if key in row else "-"


def _spread(row: Row) -> str:
    seconds = row["seconds_by_round"].values()
    return f"{row['seconds']:.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def _ratios(row: Row) -> str:
    return " ".join(f"{ratio:.2f}x {name}" for name, ratio in row["ratio_to"].items()) or "-"


COLUMNS = {
    "engine": lambda row: row["engine"],
    "step s": _spread,
    "mean s": lambda row: _number(row, "mean_s"),
    "read B/p": lambda row: _number(row, "read_bytes_per_param"),
    "write B/p": lambda row: _number(row, "write_bytes_per_param"),
    "own count": lambda row: (
        _number(row, "counted_read_bytes_per_param")
        + "+"
        + _number(row, "counted_write_bytes_per_param")
        if "counted_read_bytes" in row
        else "-"
    ),
    "floor s": lambda row: _number(row, "floor_s"),
    "x floor": lambda row: _number(row, "over_floor"),
    "busy r/w": lambda row: (
        f"{_number(row, 'busy_read')}/{_number(row, 'busy_write')}" if "busy_read" in row else "-"
    ),
    "stall s": lambda row: _number(row, "counted_stall_s"),
    "peak MB": lambda row: _number(row, "peak_steps_bytes", scale=1e6, digits=0),
    "build MB": lambda row: _number(row, "peak_build_bytes", scale=1e6, digits=0),
    "cpu s": lambda row: _number(row, "cpu_s"),
    "foreign s": lambda row: _number(row, "foreign_s"),
    "steal s": lambda row: _number(row, "steal_s"),
    "clean": lambda row: _number(row, "clean"),
    "loss diff": lambda row: f"{row['loss_difference']:.1e}",
    "step time": _ratios,
}


def markdown(rows: list[Row]) -> str:
    """The table, aligned for a terminal and valid as Markdown; failed engines below it."""
    shown = [row for row in rows if "seconds" in row]
    cells = [list(COLUMNS)] + [[cell(row) for cell in COLUMNS.values()] for row in shown]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        lines += [f"\n{row['engine']} FAILED: {error}" for error in row["errors"]]
    return "\n".join(lines)


def save(stem: Path, facts: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Write stem.json (facts, rows) and stem.md (command, machine, table)."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_text = stem.with_suffix(".json"), stem.with_suffix(".md")
    as_json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    told = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    as_text.write_text(f"# {stem.name}\n\n{told}\n\n{markdown(rows)}\n")
    return [as_json, as_text]
