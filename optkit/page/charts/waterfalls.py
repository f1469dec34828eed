"""What each stage added to the damage, and what engine, settings and stages each gained in speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optkit.measure import Metric
from optkit.page.charts.chart import CHANGES, Chart, Key, Mark, paint
from optkit.scorecard import Rung, Scorecard, format_value, metric_identity, metric_label, waterfall

RATIOS = ("paired_log", "paired_turns")
"""Pairings of numbers of which changes are ratios; a distance from the unmodified model begins at 0."""


def damage(scorecard: Scorecard) -> list[Chart]:
    """Return a waterfall for each metric of accuracy that was attributed to stages."""
    return _charts("damage", "What each stage added", scorecard.attribution)


def speed(scorecard: Scorecard) -> list[Chart]:
    """Return a waterfall for each rate that was told apart."""
    return _charts("speed", "Where the speed comes from", scorecard.speed)


def _charts(name: str, title: str, rungs: Sequence[Rung]) -> list[Chart]:
    table = waterfall(rungs)
    if table is None:
        return []
    wanted = [*{metric_identity(metric): metric for metric in rungs[-1].metrics}.values()]
    changes = [[line[2 * index + 2] for line in table.rows] for index in range(len(wanted))]
    points = [_points(metric, rungs, changes[index]) for index, metric in enumerate(wanted)]
    return [
        _waterfall(f"{name}-{index}", f"{title}: {metric_label(metric)}", metric, its)
        for index, (metric, its) in enumerate(zip(wanted, points, strict=True))
        if its
    ]


def _points(metric: Metric, rungs: Sequence[Rung], changes: Sequence[str]) -> list[dict[str, Any]]:
    names = _unlike([rung.stage for rung in rungs])
    points: list[dict[str, Any]] = []
    for name, rung, change in zip(names, rungs, changes, strict=True):
        found = next((each for each in rung.metrics if metric_identity(each) == metric_identity(metric)), None)
        if found is None or found.failure:
            continue
        before = points[-1]["after"] if points else _start(found)
        better = (found.value > before) == metric.higher_is_better
        shown = format_value(found.value, found.unit, found.interval)
        points.append(
            {
                "stage": name,
                "before": before,
                "after": found.value,
                "change": "" if found.value == before else "better" if better else "worse",
                "text": change if change != "-" else format_value(found.value, found.unit),
                "hint": f"{name}: {shown}" + (f"\n{change}" if change != "-" else ""),
            }
        )
    return points


def _start(first: Metric) -> float:
    """Return the number of the unmodified model: its own, or an agreement with itself."""
    if first.pairing in RATIOS:
        return first.value
    return 1.0 if first.higher_is_better else 0.0


def _waterfall(name: str, title: str, metric: Metric, points: Sequence[Mapping[str, Any]]) -> Chart:
    marks = [
        Mark(
            "barX",
            [point for point in points if point["change"] == change],
            {"x1": "before", "x2": "after", "y": "stage", "fill": paint(colour), "title": "hint"},
        )
        for change, colour in CHANGES.items()
    ]
    marks.append(Mark("tickX", points, {"x": "after", "y": "stage", "stroke": paint("ink"), "strokeWidth": 2}))
    unit = "" if metric.unit == metric.name else f", {metric.unit}"
    return Chart(
        name,
        title,
        marks,
        {"label": f"{metric.name}{unit}", **_scale(points)},
        rows=[point["stage"] for point in points],
        keys=[Key("better", "blue"), Key("worse", "vermillion")],
        caption="; ".join(f"{point['stage']} {point['text']}" for point in points),
    )


def _unlike(names: Sequence[str]) -> list[str]:
    """Return names of which no two are the same: stages may come twice."""
    numbers = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [f"{name} {number}" if names.count(name) > 1 else name for name, number in zip(names, numbers, strict=True)]


def _scale(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ends = [point[end] for point in points for end in ("before", "after")]
    room = 0.06 * (max(ends) - min(ends) or abs(max(ends)) or 1.0)
    least = min(ends) - (room if min(ends) > 0 else 0)
    return {"grid": True, "tickFormat": "~g", "domain": [least, max(ends) + room]}
