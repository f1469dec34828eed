"""The report as a picture (SVG): limits of decoding over the batch, in powers of 2.
It also shows what each form gains over the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from optkit.common.plot import COLOURS, Axis, Key, Line, Panel, Point, even_axis, picture, powers_axis
from optkit.reports.roofline.report import FormLimits, RooflineReport
from optkit.scorecard.numbers import format_value

DASHES = ("", "7 5")
"""Neighbouring forms, that one line may not hide another of the same limits."""
MARKS: dict[str, Literal["dot", "ring", "square"]] = {"weights": "dot", "KV cache": "ring", "compute": "square"}
NOTE = "full circle: reading weights binds; ring: reading the KV cache binds; square: arithmetic binds"
Curves: TypeAlias = Mapping[str, Sequence[tuple[int, float]]]
"""Of each form, batches and numbers."""


def to_svg(report: RooflineReport) -> str:
    """Return the picture."""
    limits = {form.name: [(cell.batch, cell.tokens_per_s) for cell in form.decode] for form in report.forms}
    rates = [rate for curve in limits.values() for _, rate in curve]
    up = powers_axis(rates, 2, lambda power: f"{2.0**power:,.0f}" if power >= 4 else f"{2.0**power:.3g}")
    panels = [_panel("limit, tokens per second", report.forms, limits, up)]
    if base := dict(limits.get(report.reference, ())):
        gains = {name: [(batch, rate / base[batch]) for batch, rate in curve] for name, curve in limits.items()}
        found = [gain for curve in gains.values() for _, gain in curve]
        up = even_axis(min(found), max(found))
        panels.append(_panel(f"times the limit of {report.reference}", report.forms, gains, up))
    bandwidth = format_value(report.bandwidth, "bytes/s")
    heading = (
        f"{report.model} on {report.device}: the most that it can decode",
        f"{report.prompt:,} tokens in the cache of each sequence; {bandwidth}, {report.source}",
    )
    keys = [Key(form.label, *_stroke(index)) for index, form in enumerate(report.forms)]
    return picture(panels, heading=heading, legend=keys, note=NOTE)


def _stroke(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], DASHES[index % 2]


def _panel(title: str, forms: Sequence[FormLimits], curves: Curves, up: Axis) -> Panel:
    batches = sorted({batch for curve in curves.values() for batch, _ in curve})
    ends = batches[0], max(batches[-1], 2 * batches[0])
    across = Axis(ends, [(batch, str(batch)) for batch in batches], "sequences at once (batch)", log=True)
    lines = []
    for index, form in enumerate(forms):
        colour, dashes = _stroke(index)
        points = [
            Point(
                batch,
                value,
                MARKS[cell.bound_by],
                f"{form.label}, batch {batch}: {value:,.4g}, bound by {cell.bound_by}",
            )
            for (batch, value), cell in zip(curves[form.name], form.decode, strict=True)
        ]
        lines.append(Line(points, colour, dashes=dashes, radius=5))
    return Panel(title, across, up, lines[::-1])
