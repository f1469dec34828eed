"""Quality against size, speed and memory: who is on the front, and what is behind whom."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optkit.comparison import Column, Comparison, Entry, Floor, Group
from optkit.comparison.table import field_text, heading, of_one_model, standing
from optkit.page.charts.chart import Chart, Colour, Key, Mark, log_scale, paint
from optkit.recipe.gates import Verdict
from optkit.scorecard import format_ratio, format_value

MOST = 100
"""Points that are drawn, by rank."""
NUMBERED = 40
"""Up to so many points carry their rank."""
WIDE_RANGE = 5
"""Largest value divided by the smallest from which on a scale is logarithmic."""
STANDS: tuple[tuple[str, Colour, Literal["dot", "ring"], str], ...] = (
    ("pick", "green", "dot", "the one to take"),
    ("front", "blue", "dot", "on the front"),
    ("behind", "grey", "ring", "behind another in all, measurably in one"),
    ("refused", "vermillion", "ring", "does not surely pass its gates and what is required"),
)
"""How a point stands, its colour and shape, and what that means."""


@dataclass(frozen=True)
class Side:
    """One axis of a chart: a column, told by its ratio if that is surer than the number itself."""

    column: Column
    by_ratio: bool

    @property
    def scale(self) -> dict[str, Any]:
        """Options of the scale but for its type."""
        told = "x unmodified" if self.by_ratio else self.column.unit
        said = heading(self.column) if told in ("", self.column.name) else f"{heading(self.column)}, {told}"
        suffix = {"bytes": "B", "s": "s"}.get("" if self.by_ratio else self.column.unit, "")
        return {"label": said, "grid": True, **({"suffix": suffix} if suffix else {"tickFormat": "~g"})}

    def point(self, entry: Entry, name: str) -> dict[str, Any] | None:
        """Return the number of an entry as fields `x`, `x_low`, `x_high` and its words; None without one."""
        cell = entry.cell(self.column.key)
        if cell is None or cell.value is None:
            return None
        value, interval = (cell.ratio, cell.ratio_interval) if self.by_ratio else (cell.value, cell.interval)
        if value is None or (value <= 0 and not math.isfinite(value)):
            return None
        low, high = interval or (None, None)
        shown = format_value(cell.value, self.column.unit, cell.interval)
        ratio = f", {format_ratio(cell.ratio, cell.ratio_interval)}" if cell.ratio is not None else ""
        words = f"{self.column.title}: {shown}{ratio}"
        return {name: value, f"{name}_low": low, f"{name}_high": high, f"{name}_text": words}

    def unmodified(self, entries: Sequence[Entry]) -> float | None:
        """Return the number of the unmodified model, as the first entry has it; None if there are several."""
        if not of_one_model(entries):
            return None
        found = (cell for each in entries if (cell := each.cell(self.column.key)) and cell.baseline is not None)
        return next((1.0 if self.by_ratio else cell.baseline for cell in found), None)


def tradeoffs(comparison: Comparison, group: Group, name: str) -> list[Chart]:
    """Return a chart for each axis of a group beside quality, and for memory."""
    entries = comparison.members(group)[:MOST]
    up = next((column for column in _columns(comparison, group) if column.role == "quality"), None)
    if up is None:
        return []
    others = [column for column in _columns(comparison, group) if column != up]
    charts = (
        _chart(comparison, entries, _side(column, entries), _side(up, entries), f"{name}-{index}")
        for index, column in enumerate(others)
    )
    return [chart for chart in charts if chart]


def _columns(comparison: Comparison, group: Group) -> list[Column]:
    """Return the axes of a group, and the memory that all of it were measured by."""
    axes = [comparison.column(key) for key in group.axes]
    entries = comparison.members(group)
    memory = (
        column
        for column in comparison.columns
        if column.role == "memory" and column.key not in group.axes and all(each.cell(column.key) for each in entries)
    )
    return [*axes, *list(memory)[:1]]


def _side(column: Column, entries: Sequence[Entry]) -> Side:
    cells = [cell for each in entries if (cell := each.cell(column.key)) and cell.value is not None]
    paired = all(cell.ratio is not None for cell in cells) and any(cell.ratio_interval for cell in cells)
    return Side(column, of_one_model(entries) and paired)


def _chart(comparison: Comparison, entries: Sequence[Entry], x: Side, y: Side, name: str) -> Chart | None:
    points = []
    for entry in entries:
        across, up = x.point(entry, "x"), y.point(entry, "y")
        if across and up:
            points.append({**across, **up, **_about(entry), "hint": _hint(entry, across, up)})
    if not points:
        return None
    at, up_at = x.unmodified(entries), y.unmodified(entries)
    known = at is not None and up_at is not None
    unmodified: list[dict[str, Any]] = [{"x": at, "y": up_at, "label": "unmodified"}] if known else []
    floors = {floor.column: floor for floor in comparison.floors}
    drawn, place = [*points, *unmodified], {"x": "x", "y": "y"}
    return Chart(
        name,
        f"{y.column.title} against {x.column.title}",
        [
            *_floor_marks(floors.get(y.column.key), up_at, "y", y.by_ratio),
            *_floor_marks(floors.get(x.column.key), at, "x", x.by_ratio),
            *_point_marks(points),
            Mark("dot", unmodified, {**place, "symbol": "diamond", "fill": paint("orange"), "r": 7, "title": "label"}),
            Mark("text", unmodified, {**place, "text": "label", "dy": -14, "fill": paint("ink")}),
        ],
        {**x.scale, **_scale(drawn, "x"), "insetLeft": 34, "insetRight": 34},
        {**y.scale, **_scale(drawn, "y"), "insetTop": 22, "insetBottom": 12},
        keys=[
            *(
                Key(f"{words}: {point['label']}" if stands == "pick" else words, colour, shape)
                for stands, colour, shape, words in STANDS
                if (point := next((each for each in points if each["stands"] == stands), None))
            ),
            *([Key("the unmodified model", "orange", "diamond")] if known else []),
            *([Key("noise floor", "floor", "band")] if {x.column.key, y.column.key} & floors.keys() else []),
        ],
        caption="Numbers are ranks, as in the table; lines are 95% intervals. ↓ less is better, ↑ more; "
        "x unmodified: times the unmodified model's.",
        height=400,
    )


def _about(entry: Entry) -> dict[str, Any]:
    stands = "pick" if entry.pick else "front" if entry.front else "behind"
    if entry.passes is not Verdict.PASS:
        stands = "refused"
    return {"label": entry.label, "stands": stands, "rank": str(entry.rank or "")}


def _hint(entry: Entry, across: Mapping[str, Any], up: Mapping[str, Any]) -> str:
    lines = [f"{entry.rank}. {entry.label} ({standing(entry)})", up["y_text"], across["x_text"]]
    return "\n".join([*lines, *recipe_lines(entry)])


def recipe_lines(entry: Entry) -> list[str]:
    """Return what an entry's recipe says otherwise than the others', e.g. `gptq` and `gptq.bits 4`."""

    def short(path: str) -> str:
        return re.sub(r"^stages\.\d+\.?", "", path)

    return [f"{short(path)} {field_text(value)}".strip() for path, value in entry.fields.items()]


def _scale(points: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    values = [point[name] for point in points]
    if min(values) <= 0 or max(values) / min(values) <= WIDE_RANGE:
        return {"type": "linear"}
    ends = [end for each in points for part in ("low", "high") if (end := each.get(f"{name}_{part}")) is not None]
    return log_scale([*values, *ends])


def _point_marks(points: Sequence[Mapping[str, Any]]) -> list[Mark]:
    front = sorted((each for each in points if each["stands"] in ("pick", "front")), key=lambda each: each["x"])
    line = {"x": "x", "y": "y", "stroke": paint("blue"), "strokeDasharray": "5 4", "strokeOpacity": 0.6}
    marks = [Mark("lineY", front, line)] if len(front) > 2 else []
    numbered = len(points) <= NUMBERED
    for stands, colour, shape, _ in STANDS:
        own = [point for point in points if point["stands"] == stands]
        stroke = {"stroke": paint(colour), "strokeWidth": 1.5, "strokeOpacity": 0.7}
        marks += [
            Mark("link", _ends(own, "x"), {"x1": "x_low", "x2": "x_high", "y": "y", **stroke}),
            Mark("link", _ends(own, "y"), {"y1": "y_low", "y2": "y_high", "x": "x", **stroke}),
        ]
        fill = paint(colour) if shape == "dot" else "var(--panel)"
        look = {"fill": fill, "stroke": paint(colour), "strokeWidth": 2, "r": 9 if numbered else 5}
        marks.append(Mark("dot", own, {"x": "x", "y": "y", **look, "title": "hint"}))
    inks = {stands: "var(--panel)" if shape == "dot" else paint("ink") for stands, _, shape, _ in STANDS}
    ranks = [{"x": each["x"], "y": each["y"], "number": each["rank"], "ink": inks[each["stands"]]} for each in points]
    return [*marks, *([Mark("numbers", ranks, {})] if numbered else [])]


def _ends(points: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [point for point in points if point[f"{name}_low"] is not None]


def _floor_marks(floor: Floor | None, value: float | None, name: str, by_ratio: bool) -> list[Mark]:
    """Return the band around the unmodified model within which a difference is none."""
    if floor is None or value is None:
        return []
    low, high = (value * (1 - floor.value), value * (1 + floor.value)) if floor.relative else (0.0, floor.value)
    if not floor.relative and by_ratio:
        return []
    options = {f"{name}1": "low", f"{name}2": "high", "fill": paint("floor")}
    return [Mark("rect", [{"low": low, "high": high}], options)]
