"""What each artifact is to the one to take: paired differences with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optkit.comparison import Column, Comparison, Difference, Floor, Group
from optkit.comparison.choice import difference_text
from optkit.comparison.table import compared_with
from optkit.page.charts.chart import Chart, Colour, Key, Mark, estimates, log_scale, paint, reference
from optkit.scorecard import format_ratio, format_value

MOST = 30
"""Rows that are drawn, by rank."""
TICKS = 4
"""Steps of a scale, about."""
RELATIONS: dict[str, Colour] = {"better": "blue", "worse": "vermillion", "none": "grey"}


def differences(comparison: Comparison, group: Group, name: str) -> list[Chart]:
    """Return a chart for each axis of a group, none if it has one member."""
    other = compared_with(group)
    members = [entry for entry in comparison.members(group) if entry.label != other][:MOST]
    charts = []
    for index, key in enumerate(group.axes):
        found = {entry.label: each for entry in members for each in entry.differences if each.axis == key}
        if found:
            floor = next((each for each in comparison.floors if each.column == key), None)
            charts.append(_chart(comparison.column(key), found, other, floor, f"{name}-{index}"))
    return charts


def _chart(column: Column, found: dict[str, Difference], other: str, floor: Floor | None, name: str) -> Chart:
    relative = next(iter(found.values())).relative
    points = [_point(label, column, each) for label, each in found.items() if each.relative == relative]
    centre = 1.0 if relative else 0.0
    marks = []
    if floor and floor.relative == relative:
        band = [{"low": centre - floor.value, "high": centre + floor.value}]
        marks.append(Mark("rect", band, {"x1": "low", "x2": "high", "fill": paint("floor")}))
    marks.append(reference(centre))
    for relation, colour in RELATIONS.items():
        own = [point for point in points if point["relation"] == relation]
        marks += estimates(own, colour, "value", "label")
    wide = relative and max(each["value"] for each in points) / min(each["value"] for each in points) > 3
    words = f"times that of {other}" if relative else f"more than {other}, {column.unit}"
    scale = log_scale([centre, *_ends(points)]) if wide else _even(points, centre)
    return Chart(
        name,
        f"{column.title} beside {other}",
        marks,
        {"label": words, "grid": True, "tickFormat": "~g", **scale},
        rows=[point["label"] for point in points],
        keys=[
            Key("better", "blue"),
            Key("worse", "vermillion"),
            Key("no measurable difference", "grey"),
            *([Key("noise floor", "floor", "band")] if floor else []),
        ],
    )


def _even(points: Sequence[Mapping[str, Any]], centre: float) -> dict[str, Any]:
    """Return a linear scale with ticks on both sides of the centre, as far as the points reach."""
    low, high = min(*_ends(points), centre), max(*_ends(points), centre)
    rough = (high - low) / TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * leading for leading in (1, 2, 5, 10) if power * leading >= rough)
    first, last = math.floor((low - centre) / step), math.ceil((high - centre) / step)
    ticks = [centre + step * index for index in range(first, last + 1)]
    return {"type": "linear", "domain": [ticks[0], ticks[-1]], "ticks": ticks}


def _ends(points: Sequence[Mapping[str, Any]]) -> list[float]:
    return [each[end] for each in points for end in ("low", "value", "high") if each[end] is not None]


def _point(label: str, column: Column, each: Difference) -> dict[str, Any]:
    shown = format_ratio if each.relative else lambda value, interval: format_value(value, column.unit, interval)
    low, high = each.interval or (None, None)
    hint = f"{label}\n{shown(each.value, each.interval)}"
    if each.relation != "none":
        hint += f"\n{difference_text(column, each)}"
    return {"label": label, "value": each.value, "low": low, "high": high, "relation": each.relation, "hint": hint}
