"""Loss curves of the stages that trained."""

from __future__ import annotations

from optkit.page.charts.chart import Chart, Key, Mark, paint
from optkit.scorecard import Scorecard, Training, training_line, trainings

WIDE_RANGE = 12
"""Largest loss divided by the smallest from which on the scale is logarithmic."""


def losses(scorecard: Scorecard) -> list[Chart]:
    """Return a chart for each training: its loss, and the loss of what was held out, over tokens."""
    return [_curve(f"loss-{index}", each) for index, each in enumerate(trainings(scorecard.steps))]


def _curve(name: str, training: Training) -> Chart:
    record = training.record
    learnt = [
        {"tokens": each.tokens, "loss": each.loss, "hint": f"step {each.step:,}: {each.loss:.4g}"}
        for each in record.points
    ]
    judged = [
        {"tokens": each.tokens, "loss": each.loss, "hint": f"step {each.step:,}: {record.judged_by} {each.loss:.4g}"}
        for each in record.judged
    ]
    drawn = [each["loss"] for each in (*learnt, *judged) if isinstance(each["loss"], float | int)]
    wide = min(drawn) > 0 and max(drawn) / min(drawn) > WIDE_RANGE
    place = {"x": "tokens", "y": "loss"}
    return Chart(
        name,
        f"Loss: {training.kind}",
        [
            Mark("lineY", learnt, {**place, "stroke": paint("blue"), "strokeWidth": 1.8}),
            Mark("dot", learnt, {**place, "fill": paint("blue"), "r": 1.5, "title": "hint"}),
            Mark("lineY", judged, {**place, "stroke": paint("vermillion"), "strokeWidth": 1.8}),
            Mark("dot", judged, {**place, "fill": paint("vermillion"), "r": 4, "title": "hint"}),
        ],
        {"label": "tokens", "tickFormat": "~s"},
        {"label": "loss", "grid": True, "type": "log" if wide else "linear", "tickFormat": "~g"},
        keys=[Key("training loss", "blue", "line"), *([Key(record.judged_by, "vermillion", "line")] if judged else [])],
        caption=training_line(training),
        height=300,
    )
