"""Every number beside the unmodified model's: ratios with their intervals, and the limits of gates."""

from __future__ import annotations

from typing import Any

from optkit.page.charts.chart import CHANGES, Chart, Key, Mark, estimates, paint, reference
from optkit.page.table import Titles
from optkit.recipe.gates import parse_gate
from optkit.scorecard import Measured, Scorecard, change_of, format_ratio, metric_label, value_text

MOST = 40
"""Rows that are drawn; the table has all."""


def ratios(scorecard: Scorecard) -> list[Chart]:
    """Return the chart of all ratios to the baseline; none if there are none."""
    found = [row for row in scorecard.rows if row.ratio is not None and row.ratio > 0]
    if not found:
        return []
    titles = Titles(row.metric for row in scorecard.rows)
    points = [_point(row, titles) for row in found[:MOST]]
    marks = [reference(1)]
    for change, colour in CHANGES.items():
        own = [point for point in points if point["change"] == change]
        marks += estimates(own, colour, "ratio", "metric")
    limits = [
        {"metric": titles(row.metric), "limit": gate.limit, "hint": f"gate {gate.text}"}
        for row in found[:MOST]
        for gate in (parse_gate(each.key, each.limit) for each in row.gates)
        if gate.of == "baseline" and gate.limit > 0
    ]
    marks.append(Mark("tickX", limits, {"x": "limit", "y": "metric", "stroke": paint("ink"), "strokeWidth": 2}))
    keys = [Key("better", "blue"), Key("worse", "vermillion"), Key("no difference shown", "grey")]
    left_out = f" {len(found) - MOST} more are in the table." if len(found) > MOST else ""
    return [
        Chart(
            "ratios",
            "Beside the unmodified model",
            marks,
            {"type": "log", "label": "times the unmodified model's", "grid": True, "tickFormat": "~g"},
            rows=[point["metric"] for point in points],
            keys=[*keys, *([Key("limit of a gate", "ink", "tick")] if limits else [])],
            caption=f"Lines are 95% intervals; without one, the number has no error.{left_out}",
        )
    ]


def _point(row: Measured, titles: Titles) -> dict[str, Any]:
    label = titles(row.metric)
    ratio = format_ratio(row.ratio or 0.0, row.ratio_interval)
    before = f"{value_text(row.baseline)} → " if row.baseline else ""
    low, high = row.ratio_interval or (None, None)
    return {
        "metric": label,
        "ratio": row.ratio,
        "low": low,
        "high": high,
        "change": change_of(row.ratio, row.ratio_interval, row.metric.higher_is_better),
        "hint": f"{metric_label(row.metric)}\n{before}{value_text(row.metric)}\n{ratio}",
    }
