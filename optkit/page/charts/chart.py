"""A chart as data: marks and scales by the names that Observable Plot has for them.
The page's script hands them over; https://observablehq.com/plot/features/marks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from optkit.common.visible import visible

Colour: TypeAlias = Literal["blue", "vermillion", "green", "orange", "sky", "purple", "ink", "grey", "floor"]
PALETTE: tuple[Colour, ...] = ("blue", "vermillion", "green", "orange", "purple", "sky", "ink", "grey")
"""Okabe and Ito's, https://jfly.uni-koeln.de/color/; page.css has a shade of each for light and dark."""
CHANGES: Mapping[str, Colour] = {"better": "blue", "worse": "vermillion", "": "grey"}
"""What a change for the better, for the worse and of unknown direction is drawn in."""


MODELS: tuple[tuple[str, Colour], ...] = (("unmodified", "orange"), ("artifact", "blue"))


def paint(colour: Colour) -> str:
    """Return what a mark's `fill` or `stroke` is set to."""
    return f"var(--{colour})"


@dataclass(frozen=True)
class Mark:
    """Marks of one kind: a record for each, and how its fields are shown."""

    kind: Literal["dot", "lineY", "link", "text", "tickX", "ruleX", "ruleY", "rect", "barX", "numbers"]
    """`numbers` is the script's: a `number` in the `ink` of its record, those of dots that cover each
    other above them.
    """
    data: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    """Of the mark. A word that is a field of the records says which one; `title` is the field that
    a pointer shows.
    """

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "data": [_visible(dict(each)) for each in self.data], "options": dict(self.options)}


@dataclass(frozen=True)
class Key:
    """An entry of the legend."""

    words: str
    colour: Colour
    shape: Literal["dot", "ring", "line", "dashes", "tick", "band", "diamond"] = "dot"


@dataclass(frozen=True)
class Chart:
    """One chart with its words."""

    name: str
    """Tells the charts of a page apart: letters, digits and dashes."""
    title: str
    marks: Sequence[Mark]
    x: Mapping[str, Any]
    """Options of the scale."""
    y: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[str] = ()
    """Labels of an ordinal y: beside the marks, or above them on a narrow page."""
    keys: Sequence[Key] = ()
    caption: str = ""
    height: int | None = None
    """In pixels; of rows, what they need."""

    @property
    def printed_height(self) -> float:
        """About its height on paper with its words, in pixels: the script's layout at half a page's width."""
        beside = max(map(len, self.rows), default=0) * 6.4 < 200
        drawn = len(self.rows) * (25 if beside else 42) + 64 if self.rows else self.height or 300
        return min(0.67 * drawn, 360) + 60

    def to_json(self) -> dict[str, Any]:
        """Return what the page's script draws, as a JSON value."""
        return {
            "x": dict(self.x),
            "y": dict(self.y),
            "rows": [visible(row) for row in self.rows],
            "height": self.height,
            "marks": [mark.to_json() for mark in self.marks],
        }


def printed(charts: Iterable[Chart], most: float = 1800) -> set[str]:
    """Return the names of the charts that one printed page has room for, in two columns; the first always."""
    height, names = 0.0, set[str]()
    for chart in charts:
        height += chart.printed_height
        if not names or height <= most:
            names.add(chart.name)
    return names


def reference(value: float, across: bool = True) -> Mark:
    """Return the line of what everything else is compared with."""
    return Mark("ruleX" if across else "ruleY", [{"at": value}], {"x" if across else "y": "at", "stroke": paint("ink")})


def log_scale(values: Iterable[float]) -> dict[str, Any]:
    """Return a logarithmic scale that begins and ends at a tick that the script labels, around all values above 0."""
    known = [value for value in values if value > 0]
    low, high = min(known), max(known)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ends = [float(f"{leading}e{power}") for power in powers for leading in (1, 2, 5)]
    first, last = max(end for end in ends if end <= low), min(end for end in ends if end >= high)
    threes = [float(f"3e{power}") for power in powers]
    ticks = [tick for tick in sorted([*ends, *threes]) if first <= tick <= last]
    return {"type": "log", "domain": [first, last], "ticks": ticks}


def estimates(points: Sequence[Mapping[str, Any]], colour: Colour, x: str, y: str) -> list[Mark]:
    """Return a dot for each point at its field `x`, in the row of its field `y`, and the line of its
    interval from `low` to `high` if it has one; `hint` is shown.
    """
    sure = [point for point in points if point["low"] is not None]
    line = {"x1": "low", "x2": "high", "y": y, "stroke": paint(colour), "strokeWidth": 3, "strokeOpacity": 0.5}
    return [
        Mark("link", sure, line),
        Mark("dot", points, {"x": x, "y": y, "fill": paint(colour), "r": 5, "title": "hint"}),
    ]


def _visible(record: dict[str, Any]) -> dict[str, Any]:
    # A hint has lines; whatever else turns the direction of text or begins a line is shown as what it is.
    lines = {name: "\n".join(map(visible, text.split("\n"))) for name, text in record.items() if isinstance(text, str)}
    return record | lines
