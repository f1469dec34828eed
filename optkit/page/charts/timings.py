"""Latencies as they were taken: each repeat, each turn, and the mean with its interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optkit.measure import Metric
from optkit.page.charts.chart import MODELS, Chart, Key, Mark, estimates, paint
from optkit.scorecard import Measured, Scorecard, format_value

MOST = 4
"""Configurations that are drawn; the table has all."""


def timings(scorecard: Scorecard) -> list[Chart]:
    """Return a chart of latencies for each configuration that was timed."""
    groups: dict[str, list[Measured]] = {}
    for row in scorecard.rows:
        if row.metric.unit == "s" and row.metric.samples and not row.metric.failure:
            labels = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.metric.labels.items())
            groups.setdefault(labels, []).append(row)
    return [_latencies(index, labels, rows) for index, (labels, rows) in enumerate(list(groups.items())[:MOST])]


def _latencies(index: int, labels: str, rows: list[Measured]) -> Chart:
    taken = [point for row in rows for point in _points(row)]
    marks = []
    for model, colour in MODELS:
        own = [point for point in taken if point["model"] == model]
        means = [point for point in own if point["kind"] == "mean"]
        repeats = [point for point in own if point["kind"] == "repeat"]
        ticks = {"x": "seconds", "y": "row", "stroke": paint(colour), "strokeOpacity": 0.45, "inset": 3}
        marks += [Mark("tickX", repeats, ticks), *estimates(means, colour, "seconds", "row")]
    return Chart(
        f"latency-{index}",
        f"Latency{f': {labels}' if labels else ''}",
        marks,
        {"type": "log", "label": "latency", "grid": True, "suffix": "s"},
        rows=list(dict.fromkeys(point["row"] for point in taken)),
        keys=[Key(model, colour) for model, colour in MODELS],
        caption="Thin ticks are single repeats, lines the 95% interval of the mean of the turns.",
    )


def _points(row: Measured) -> Iterator[dict[str, Any]]:
    for (model, _), metric in zip(MODELS, (row.baseline, row.metric), strict=True):
        if metric is None or metric.failure:
            continue
        place = {"model": model, "row": f"{metric.name.removesuffix('_s').replace('_', ' ')}, {model}"}
        yield place | _mean(metric)
        for repeat in (value for turn in metric.repeats or (metric.samples,) for value in turn):
            yield place | {"kind": "repeat", "seconds": repeat}


def _mean(metric: Metric) -> dict[str, Any]:
    low, high = metric.interval or (metric.value, metric.value)
    if low <= 0:  # a logarithmic scale has no place for it
        low = min((each for turn in metric.repeats or (metric.samples,) for each in turn if each > 0), default=high)
    shown = format_value(metric.value, metric.unit, metric.interval)
    return {"kind": "mean", "seconds": metric.value, "low": low, "high": high, "hint": f"{metric.name}\n{shown}"}
