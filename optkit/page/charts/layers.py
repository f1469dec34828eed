"""The error of each layer: what quantizers reported, and what the eval `sensitivity` predicted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from optkit.page.charts.chart import PALETTE, Chart, Key, Mark, paint
from optkit.scorecard import Scorecard, value_text

BLOCK = re.compile(r"^(?:.*\.)?(\d+)\.(.+)$")
"""The number of a block, and the layer in it."""
LOSSES = "losses"
"""Key of a report's details: layer -> error of its outputs, relative to them."""
SYMBOLS = ("circle", "square", "triangle", "diamond", "cross", "star", "wye", "asterisk")


def layers(scorecard: Scorecard) -> list[Chart]:
    """Return a chart for each step that says the error of its layers, and one of sensitivities."""
    found = [
        _errors(f"layers-{index}", step.kind, losses)
        for index, step in enumerate(scorecard.steps)
        if (losses := _numbers((step.report.get("details") or {}).get(LOSSES)))
    ]
    return [*found, *_sensitivity(scorecard)]


def _numbers(losses: Any) -> dict[str, float]:
    """Return what can be drawn of a report's losses; what a plug-in puts there may be anything."""
    pairs = losses.items() if isinstance(losses, Mapping) else ()
    return {str(name): value for name, value in pairs if isinstance(value, float | int) and value > 0}


def _errors(name: str, kind: str, losses: Mapping[str, float]) -> Chart:
    points = [_point(layer, loss) for layer, loss in losses.items()]
    parts = list(dict.fromkeys(point["part"] for point in points))
    marks = []
    for index, part in enumerate(parts):
        colour = paint(PALETTE[index % len(PALETTE)])
        symbol = SYMBOLS[index % len(SYMBOLS)]
        own = [point for point in points if point["part"] == part]
        options = {"x": "block", "y": "error", "stroke": colour, "symbol": symbol, "r": 4, "strokeWidth": 1.6}
        marks.append(Mark("dot", own, {**options, "title": "hint"}))
    return Chart(
        name,
        f"Error of each layer: {kind}",
        marks,
        {"label": "block", "nice": True},
        {"type": "log", "label": "error of the outputs, relative", "grid": True, "tickFormat": "~g"},
        keys=[Key(part, PALETTE[index % len(PALETTE)]) for index, part in enumerate(parts)],
        caption="What the rounding of one layer's weights changes of its outputs on the calibration text: "
        "squared, as a share of their square.",
        height=320,
    )


def _point(layer: str, loss: float) -> dict[str, Any]:
    place = BLOCK.match(layer)
    block, part = (int(place[1]), place[2]) if place else (0, layer)
    return {"block": block, "part": part, "error": loss, "hint": f"{layer}\n{loss:.3g}"}


def _sensitivity(scorecard: Scorecard) -> Iterable[Chart]:
    rows = [row.metric for row in scorecard.rows if row.metric.name == "layer_kl_divergence" and not row.metric.failure]
    if rows:
        points: list[dict[str, Any]] = [
            {"layer": str(each.labels.get("layer", "")), "kl": each.value, "hint": value_text(each)} for each in rows
        ]
        yield Chart(
            "sensitivity",
            "Layers that cost most",
            [Mark("barX", points, {"x": "kl", "y": "layer", "fill": paint("vermillion"), "title": "hint"})],
            {"label": "predicted divergence, nats/token", "grid": True, "tickFormat": "~g"},
            rows=[point["layer"] for point in points],
            caption="What the error of one layer alone does to the predictions, to second order.",
        )
