"""The report as a picture (SVG): a panel for each choice, a point for each layer.
Blocks go across, and divergence goes up in powers of 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape

from optkit.reports.sensitivity.report import LayerRow, SensitivityReport

PANEL = (420, 260)
"""Width and height of what is drawn in, in pixels."""
MARGIN = (64, 40, 20, 44)
"""Left, top, right and bottom of each panel, in pixels."""
PER_ROW = 2
"""Panels side by side."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
"""Paul Tol's bright scheme, which colour-blind people can tell apart;
https://personal.sron.nl/~pault/.
"""
LEGEND_LINE = 18
LEAST_DECADES = 2


def to_svg(report: SensitivityReport) -> str:
    """Return the picture."""
    kinds = list(report.by_kind())
    colours = {kind: COLOURS[place % len(COLOURS)] for place, kind in enumerate(kinds)}
    low, high = _decades(report.layers)
    cell = (PANEL[0] + MARGIN[0] + MARGIN[2], PANEL[1] + MARGIN[1] + MARGIN[3])
    columns = min(PER_ROW, len(report.choices))
    rows = -(-len(report.choices) // columns)
    width, height = columns * cell[0], 34 + rows * cell[1] + LEGEND_LINE * -(-len(kinds) // (2 * columns)) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(
            16,
            22,
            f"{report.model}: KL divergence of quantizing one layer alone ({report.rounding}), nats per token",
            size=14,
        ),
    ]
    for place, label in enumerate(report.labels):
        left, top = place % columns * cell[0] + MARGIN[0], 34 + place // columns * cell[1] + MARGIN[1]
        title = f"{label}: {report.bits_per_weight[place]:.2f} bits per weight, sum {report.totals[place]:.3g}"
        parts += _axes(left, top, title, max(row.block for row in report.layers), low, high)
        parts += _lines(report.layers, place, left, top, colours, low, high)
    for place, kind in enumerate(kinds):
        x, y = (
            64 + place % (2 * columns) * (cell[0] // 2),
            34 + rows * cell[1] + LEGEND_LINE * (place // (2 * columns)) + 8,
        )
        parts += [f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colours[kind]}"/>', _text(x + 10, y, kind)]
    return "\n".join([*parts, "</svg>", ""])


def _decades(layers: Iterable[LayerRow]) -> tuple[int, int]:
    """Return the powers of 10 around all divergences that are not 0."""
    found = [math.log10(nats) for row in layers for nats in row.divergence if nats > 0] or [0.0]
    low, high = math.floor(min(found)), math.ceil(max(found))
    return min(low, high - LEAST_DECADES), high


def _axes(left: int, top: int, title: str, last_block: int, low: int, high: int) -> list[str]:
    parts = [_text(left, top - 12, title)]
    for decade in range(low, high + 1):
        y = _up(decade, top, low, high)
        parts.append(f'<line x1="{left}" x2="{left + PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(left - 8, y + 4, f"1e{decade}", anchor="end"))
    step = max(1, -(-(last_block + 1) // 8))
    for block in range(0, last_block + 1, step):
        parts.append(_text(_across(block, left, last_block), top + PANEL[1] + 18, str(block), anchor="middle"))
    parts.append(_text(left + PANEL[0] / 2, top + PANEL[1] + 34, "decoder block", anchor="middle"))
    return parts


def _lines(
    layers: Iterable[LayerRow], place: int, left: int, top: int, colours: dict[str, str], low: int, high: int
) -> list[str]:
    """Return the points of one panel, joined by a thin line if a block has one layer of the kind."""
    layers = sorted(layers, key=lambda row: row.block)
    last = max(row.block for row in layers)
    parts = []
    for kind, colour in colours.items():
        drawn = [row for row in layers if row.kind == kind and row.divergence[place] > 0]
        points = [
            (_across(row.block, left, last), _up(math.log10(row.divergence[place]), top, low, high)) for row in drawn
        ]
        if len({row.block for row in drawn}) == len(drawn):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.4"/>')
        for row, (x, y) in zip(drawn, points, strict=True):
            named = f"<title>{escape(row.name)}: {row.divergence[place]:.3g}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{named}</circle>')
    return parts


def _across(block: int, left: int, last_block: int) -> float:
    return left + PANEL[0] * (block + 0.5) / (last_block + 1)


def _up(decade: float, top: int, low: int, high: int) -> float:
    return top + PANEL[1] * (high - decade) / (high - low)


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
