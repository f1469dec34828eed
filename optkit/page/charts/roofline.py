"""How near prefill and decode come to what the device allows: the rows of the eval `roofline`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optkit.measure import Metric
from optkit.page.charts.chart import MODELS, Chart, Key, Mark, estimates, paint
from optkit.scorecard import Scorecard, format_value

PHASES = ("decode", "prefill")


def roofline(scorecard: Scorecard) -> list[Chart]:
    """Return the chart of rates beside their limits; none without that eval."""
    rows = [point for phase in PHASES for point in _points(scorecard, phase)]
    if not rows:
        return []
    own = {colour: [row for row in rows if row["model"] == model] for model, colour in MODELS}
    marks = [
        *(mark for colour, points in own.items() for mark in estimates(points, colour, "rate", "row")),
        Mark("tickX", rows, {"x": "high", "y": "row", "stroke": paint("ink"), "strokeWidth": 3}),
    ]
    return [
        Chart(
            "roofline",
            "What the device would allow",
            marks,
            {"type": "log", "label": "tokens per second", "grid": True, "tickFormat": "~s"},
            rows=[row["row"] for row in rows],
            keys=[*(Key(*each) for each in MODELS), Key("limit of the device", "ink", "tick")],
            caption="The limit counts the bytes and operations of a token against the bandwidth and arithmetic "
            "measured on this device.",
        )
    ]


def _points(scorecard: Scorecard, phase: str) -> Iterator[dict[str, Any]]:
    def find(name: str, labels: dict[str, int | str], model: str) -> Metric | None:
        row = next((each for each in scorecard.rows if (each.metric.name, each.metric.labels) == (name, labels)), None)
        found = None if row is None else row.metric if model == "artifact" else row.baseline
        return None if found is None or found.failure else found

    for row in scorecard.rows:
        if row.metric.name != f"{phase}_limit_tokens_per_s":
            continue
        labels = row.metric.labels
        words = ", ".join([phase, *(f"{name.replace('_', ' ')} {value}" for name, value in labels.items())])
        for model, _ in MODELS:
            limit = find(row.metric.name, labels, model)
            rate = find(f"{phase}_tokens_per_s", labels, model)
            share = find(f"{phase}_of_limit", labels, model)
            if limit and rate and limit.value > 0 and rate.value > 0:
                shown, most = (format_value(each.value, each.unit) for each in (rate, limit))
                name = f"{words}, {model}"
                hint = f"{name}\n{shown} of {most}{f', {format_value(share.value, share.unit)}' if share else ''}"
                ends = {"rate": rate.value, "low": rate.value, "high": limit.value}
                yield {"row": name, "model": model, **ends, "hint": hint}
