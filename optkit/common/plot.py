"""Plots of lines and points as pictures (SVG): panels side by side, and one legend below them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
"""Paul Tol's bright scheme, which colour-blind people can tell apart; https://personal.sron.nl/~pault/."""
MARGIN = (78, 40, 26, 52)
"""Left, top, right and bottom of each panel, in pixels."""
PANEL = (430, 270)
"""Width and height of what is drawn in, in pixels."""
COLUMNS = 2
LETTER = 7
"""About the width of a letter, in pixels."""
TICKS = 5
SMALLEST_SPAN = 1e-300
"""Of an axis: what is left of a smaller one cannot be divided any more."""
SMALLEST_SHARE = 1e-9
"""Of the largest value on an axis: between closer ones floats are too far apart."""
MOST_POWERS = 10
Attributes: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """What lies between two values, even or logarithmic, and what is written beside it."""

    ends: tuple[float, float]
    ticks: Sequence[tuple[float, str]]
    label: str = ""
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, 0 and 1 at the ends."""
        low, high, found = (math.log(each) if self.log else each for each in (*self.ends, value))
        return (found - low) / (high - low)


@dataclass(frozen=True)
class Point:
    """A point of a line."""

    x: float
    y: float
    mark: Literal["", "dot", "ring", "square"] = ""
    title: str = ""
    """What a browser shows when the mouse is on its mark."""


@dataclass(frozen=True)
class Line:
    """Points and what joins them."""

    points: Sequence[Point]
    colour: str
    width: float = 2
    """In pixels; 0 joins nothing."""
    dashes: str = ""
    opacity: float = 1
    radius: float = 4
    """Of its marks, in pixels."""


@dataclass(frozen=True)
class Panel:
    """Lines in one frame; those that come later lie above."""

    title: str
    across: Axis
    up: Axis
    lines: Sequence[Line]


@dataclass(frozen=True)
class Key:
    """An entry of the legend."""

    words: str
    colour: str
    dashes: str = ""
    dot: bool = False


def picture(panels: Sequence[Panel], *, heading: Sequence[str] = (), legend: Sequence[Key] = (), note: str = "") -> str:
    """Return the picture: headings, panels in rows, legend, note."""
    left, above, right, below = MARGIN
    columns = min(COLUMNS, len(panels))
    cell = (left + PANEL[0] + right, above + PANEL[1] + below)
    width, top = columns * cell[0], 22 * len(heading) + 10
    parts = [_text(16, 24 + 19 * row, words, size=12 if row else 15) for row, words in enumerate(heading)]
    for index, panel in enumerate(panels):
        place = (index % columns * cell[0] + left, top + index // columns * cell[1] + above)
        parts += _panel(panel, place)
    bottom = top + -(-len(panels) // columns) * cell[1] + 8
    keys, rows = _legend(legend, width, bottom)
    bottom += 18 * rows
    if note:
        keys.append(_text(left, bottom + 8, note, colour="#555555"))
        bottom += 22
    frame: Attributes = {"width": width, "height": bottom, "viewBox": f"0 0 {width} {bottom}"}
    inside = [_tag("rect", width=width, height=bottom, fill="white"), *parts, *keys]
    body = "\n".join(["", *inside, ""])
    svg = _tag(
        "svg", body, xmlns="http://www.w3.org/2000/svg", **frame, font_family="system-ui, sans-serif", font_size=12
    )
    return f"{svg}\n"


def even_axis(low: float, high: float) -> Axis:
    """Return an even axis around two values that begins and ends at round numbers."""
    lines = round_numbers(low, high)
    return Axis((lines[0], lines[-1]), [(each, f"{each:.4g}") for each in lines])


def powers_axis(values: Sequence[float], base: int, show: Callable[[int], str], least: int = 1) -> Axis:
    """Return a logarithmic axis around positive values, from power to power, at `least` so many."""
    powers = [math.log(value, base) for value in values]
    high = math.ceil(max(powers) - 1e-9)
    low = min(math.floor(min(powers) + 1e-9), high - least)
    ticks = range(low, high + 1, -(-(high - low) // MOST_POWERS))
    ends = float(base) ** low, float(base) ** high
    return Axis(ends, [(float(base) ** power, show(power)) for power in ticks], log=True)


def round_numbers(low: float, high: float) -> list[float]:
    """Return about `TICKS` round numbers around two."""
    share = SMALLEST_SHARE * max(abs(low), abs(high))
    raw = max((high - low) or abs(high) or 1.0, share, SMALLEST_SPAN) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _panel(panel: Panel, place: tuple[int, int]) -> Iterator[str]:
    (left, top), (width, height) = place, PANEL
    right, bottom = left + width, top + height
    yield _text(left, top - 14, panel.title, size=13)
    for value, words in panel.up.ticks:
        y = top + height * (1 - panel.up.place(value))
        yield _tag("line", x1=left, x2=right, y1=y, y2=y, stroke="#dddddd")
        yield _text(left - 8, y + 4, words, anchor="end")
    for value, words in panel.across.ticks:
        yield _text(left + width * panel.across.place(value), bottom + 18, words, anchor="middle")
    yield _text(left + width / 2, bottom + 36, panel.across.label, anchor="middle")
    for line in panel.lines:
        points = [
            (left + width * panel.across.place(point.x), top + height * (1 - panel.up.place(point.y)))
            for point in line.points
        ]
        yield from _line(line, points)


def _line(line: Line, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    if line.width and points:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke: Attributes = {"stroke": line.colour, "stroke_width": line.width, "stroke_linejoin": "round"}
        stroke |= {"stroke_dasharray": line.dashes, "stroke_opacity": "" if line.opacity == 1 else line.opacity}
        yield _tag("polyline", points=path, fill="none", **stroke)
    for point, (x, y) in zip(line.points, points, strict=True):
        title = _tag("title", escape(point.title)) if point.title else ""
        if point.mark == "square":
            side = 2 * line.radius
            corner = {"x": x - line.radius, "y": y - line.radius}
            yield _tag("rect", title, **corner, width=side, height=side, fill=line.colour)
        elif point.mark:
            ring = point.mark == "ring"
            fill, edge = ("white", line.colour) if ring else (line.colour, "white")
            r, stroke_width = (line.radius - 1, 2) if ring else (line.radius, 1)
            yield _tag("circle", title, cx=x, cy=y, r=r, fill=fill, stroke=edge, stroke_width=stroke_width)


def _legend(keys: Sequence[Key], width: int, top: int) -> tuple[list[str], int]:
    """Return the entries, in rows that fit the width, and the number of rows."""
    parts, row = [], 0
    x = MARGIN[0]
    for key in keys:
        if x > MARGIN[0] and x + 30 + LETTER * len(key.words) > width:
            x, row = MARGIN[0], row + 1
        y = top + 18 * row
        if key.dot:
            parts.append(_tag("circle", cx=x + 16, cy=y, r=4, fill=key.colour))
        else:
            stroke: Attributes = {"stroke": key.colour, "stroke_width": 3, "stroke_dasharray": key.dashes}
            parts.append(_tag("line", x1=x, x2=x + 24, y1=y, y2=y, **stroke))
        parts.append(_text(x + 30, y + 4, key.words))
        x += 54 + LETTER * len(key.words)
    return parts, row + 1 if keys else 0


def _text(x: float, y: float, words: str, anchor: str = "", size: int | str = "", colour: str = "") -> str:
    return _tag("text", escape(words), x=x, y=y, text_anchor=anchor, font_size=size, fill=colour)


def _tag(tag: str, inside: str = "", **attributes: Any) -> str:
    """Return an element; attributes that are empty are left out, and numbers have one decimal."""
    said = {
        name.replace("_", "-"): f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
        for name, value in attributes.items()
        if value != ""
    }
    return f"<{' '.join([tag, *(f'{name}={quoteattr(value)}' for name, value in said.items())])}>{inside}</{tag}>"
