"""The report as a picture (SVG): limits of decoding over the batch, in powers of 2.
It also shows what each form gains over the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias
from xml.sax.saxutils import escape

from optkit.reports.roofline.report import FormLimits, RooflineReport
from optkit.scorecard.numbers import format_value

PANEL = (430, 290)
"""Width and height of what is drawn in, in pixels."""
MARGIN = (78, 46, 26, 52)
"""Left, top, right and bottom of each panel, in pixels."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Paul Tol's bright scheme, which colour-blind people can tell apart;
https://personal.sron.nl/~pault/.
"""
DASHES = ("", "7 5")
"""Neighbouring forms, that one line may not hide another of the same limits."""
MARKS = {
    "weights": "full circle: reading weights binds",
    "KV cache": "ring: reading the KV cache binds",
    "compute": "square: arithmetic binds",
}


def to_svg(report: RooflineReport) -> str:
    """Return the picture."""
    colours = {form.name: COLOURS[place % len(COLOURS)] for place, form in enumerate(report.forms)}
    width, height = 2 * (PANEL[0] + MARGIN[0] + MARGIN[2]), 62 + PANEL[1] + MARGIN[1] + MARGIN[3] + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(16, 24, f"{report.model} on {report.device}: the most that it can decode", size=15),
        _text(
            16,
            42,
            f"{report.prompt:,} tokens in the cache of each sequence; "
            f"{format_value(report.bandwidth, 'bytes/s')}, "
            f"{report.source}",
        ),
    ]
    limits = {form.name: [(cell.batch, cell.tokens_per_s) for cell in form.decode] for form in report.forms}
    parts += _panel(report.forms, limits, 0, "limit, tokens per second", colours, _powers)
    base = dict(limits.get(report.reference, ()))
    if base:
        gains = {name: [(batch, rate / base[batch]) for batch, rate in points] for name, points in limits.items()}
        parts += _panel(report.forms, gains, 1, f"times the limit of {report.reference}", colours, _steps)
    low = height - 46
    for place, form in enumerate(report.forms):
        x = MARGIN[0] + 130 * place
        stroke = f'stroke="{colours[form.name]}" stroke-width="3" stroke-dasharray="{DASHES[place % 2]}"'
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="{low}" y2="{low}" {stroke}/>')
        parts.append(_text(x + 28, low + 4, form.label))
    parts.append(_text(MARGIN[0], low + 26, "; ".join(MARKS.values()), colour="#555555"))
    return "\n".join([*parts, "</svg>", ""])


Scale: TypeAlias = Callable[[float], float]


def _powers(values: Sequence[float]) -> tuple[Scale, list[float]]:
    """Return a scale from 0 to 1 in powers of 2 around the values, and its lines' labels."""
    low, high = math.floor(math.log2(min(values)) + 1e-9), math.ceil(math.log2(max(values)) - 1e-9)
    high = max(high, low + 1)
    return lambda value: (math.log2(value) - low) / (high - low), [
        2.0**power for power in range(low, high + 1, -(-(high - low) // 10))
    ]


def _steps(values: Sequence[float]) -> tuple[Scale, list[float]]:
    """Return an even scale in steps of a half around the values."""
    low, high = math.floor(2 * min(values) + 1e-9) / 2, math.ceil(2 * max(values) - 1e-9) / 2
    high = max(high, low + 0.5)
    return lambda value: (value - low) / (high - low), [low + step / 2 for step in range(round(2 * (high - low)) + 1)]


def _panel(
    forms: Sequence[FormLimits],
    points: dict[str, list[tuple[int, float]]],
    place: int,
    title: str,
    colours: dict[str, str],
    scaled: Callable[[Sequence[float]], tuple[Scale, list[float]]],
) -> list[str]:
    left, top = MARGIN[0] + place * (PANEL[0] + MARGIN[0] + MARGIN[2]), 56 + MARGIN[1]
    batches = sorted({batch for line in points.values() for batch, _ in line})
    first, last = math.log2(batches[0]), max(math.log2(batches[-1]), math.log2(batches[0]) + 1)
    scale, lines = scaled([value for line in points.values() for _, value in line])

    def across(batch: int) -> float:
        return left + PANEL[0] * (math.log2(batch) - first) / (last - first)

    def up(value: float) -> float:
        return top + PANEL[1] * (1 - scale(value))

    parts = [_text(left, top - 14, title, size=13)]
    for value in lines:
        y = up(value)
        parts.append(f'<line x1="{left}" x2="{left + PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(left - 8, y + 4, f"{value:,.0f}" if value >= 16 else f"{value:.3g}", anchor="end"))
    for batch in batches:
        parts.append(_text(across(batch), top + PANEL[1] + 18, str(batch), anchor="middle"))
    parts.append(_text(left + PANEL[0] / 2, top + PANEL[1] + 36, "sequences at once (batch)", anchor="middle"))
    for index, form in reversed(list(enumerate(forms))):
        line = points[form.name]
        path = " ".join(f"{across(batch):.1f},{up(value):.1f}" for batch, value in line)
        stroke = f'stroke="{colours[form.name]}" stroke-width="2" stroke-dasharray="{DASHES[index % 2]}"'
        parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        for (batch, value), cell in zip(line, form.decode, strict=True):
            named = f"<title>{escape(form.label)}, batch {batch}: {value:,.4g}, bound by {cell.bound_by}</title>"
            parts.append(_mark(cell.bound_by, across(batch), up(value), colours[form.name], named))
    return parts


def _mark(bound_by: str, x: float, y: float, colour: str, named: str) -> str:
    if bound_by == "compute":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}">{named}</rect>'
    fill = colour if bound_by == "weights" else "white"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2">{named}</circle>'


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(words)}</text>'
    )
