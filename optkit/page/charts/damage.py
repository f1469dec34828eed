"""What each stage added to the damage, as a waterfall for each metric of accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optkit.measure import Metric
from optkit.page.charts.chart import CHANGES, Chart, Key, Mark, paint
from optkit.scorecard import Rung, Scorecard, format_value, metric_identity, metric_label, waterfall


def damage(scorecard: Scorecard) -> list[Chart]:
    """Return a waterfall for each metric that was attributed to stages."""
    rungs, table = scorecard.attribution, waterfall(scorecard.attribution)
    if table is None:
        return []
    wanted = [*{metric_identity(metric): metric for metric in rungs[-1].metrics}.values()]
    changes = [[line[2 * index + 2] for line in table.rows] for index in range(len(wanted))]
    return [_waterfall(index, metric, rungs, changes[index]) for index, metric in enumerate(wanted)]


def _waterfall(index: int, metric: Metric, rungs: Sequence[Rung], changes: Sequence[str]) -> Chart:
    names = _unlike([rung.stage for rung in rungs])
    points: list[dict[str, Any]] = []
    for name, rung, change in zip(names, rungs, changes, strict=True):
        found = next((each for each in rung.metrics if metric_identity(each) == metric_identity(metric)), None)
        if found is None:
            continue
        before = points[-1]["after"] if points else found.value if metric.pairing == "paired_log" else 0.0
        better = (found.value > before) == metric.higher_is_better
        shown = format_value(found.value, found.unit, found.interval)
        points.append(
            {
                "stage": name,
                "before": before,
                "after": found.value,
                "change": "" if found.value == before else "better" if better else "worse",
                "text": change if change != "-" else format_value(found.value, found.unit),
                "hint": f"after {name}: {shown}\n{change}",
            }
        )
    marks = [
        Mark(
            "barX",
            [point for point in points if point["change"] == change],
            {"x1": "before", "x2": "after", "y": "stage", "fill": paint(colour), "title": "hint"},
        )
        for change, colour in CHANGES.items()
    ]
    marks.append(Mark("tickX", points, {"x": "after", "y": "stage", "stroke": paint("ink"), "strokeWidth": 2}))
    return Chart(
        f"damage-{index}",
        f"What each stage added: {metric_label(metric)}",
        marks,
        {
            "label": metric.name if metric.unit == metric.name else f"{metric.name}, {metric.unit}",
            **_scale(points),
        },
        rows=[point["stage"] for point in points],
        keys=[Key("better", "blue"), Key("worse", "vermillion")],
        caption="; ".join(f"{point['stage']} {point['text']}" for point in points),
    )


def _unlike(names: Sequence[str]) -> list[str]:
    """Return names of which no two are the same: stages may come twice."""
    return [
        name if names.count(name) == 1 else f"{name} {names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]


def _scale(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ends = [point[end] for point in points for end in ("before", "after")]
    room = 0.06 * (max(ends) - min(ends) or abs(max(ends)) or 1.0)
    least = min(ends) - (room if min(ends) > 0 else 0)
    return {"grid": True, "tickFormat": "~g", "domain": [least, max(ends) + room]}
