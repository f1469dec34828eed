"""report.html: several scorecards, and which of them to take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.comparison import Column as Metric
from optkit.comparison import Comparison, Entry, Group
from optkit.comparison.table import (
    UNMODIFIED,
    bests_text,
    cell_text,
    compared_with,
    floor_text,
    heading,
    left_out_lines,
    shown_columns,
    standing,
    unmodified_cells,
)
from optkit.page.charts.chart import Chart, printed
from optkit.page.charts.differences import differences
from optkit.page.charts.tradeoffs import recipe_lines, tradeoffs
from optkit.page.command import command
from optkit.page.render import render
from optkit.page.table import Cell, Column, TableRow, apart
from optkit.recipe.gates import Verdict
from optkit.scorecard import Scorecard, footnotes

MOST_ROWS = 100
"""Of a group's table, by rank; `optkit compare --csv` has all."""
REVISION = re.compile(r"@[^@/]*$")


@dataclass(frozen=True)
class Ranked:
    """What can be ranked together, as the page shows it."""

    group: Group
    title: str
    tiles: list[dict[str, str]]
    columns: list[Column]
    rows: list[TableRow]
    more: int
    """Entries that the table leaves out."""
    tradeoffs: list[Chart]
    differences: list[Chart]
    beside: str
    """Whom the differences are to."""
    command: str
    """What makes the pick."""
    axes: str
    """What they are ranked by."""
    bests: str
    """Which one to take if one of the axes alone counts."""


def comparison_page(comparison: Comparison, picks: Mapping[str, Scorecard] | None = None) -> str:
    """Return the page of a comparison. `picks` are scorecards by their labels, for the commands."""
    groups = [_ranked(comparison, index, picks or {}) for index in range(len(comparison.groups))]
    charts = [chart for each in groups for chart in (*each.tradeoffs, *each.differences)]
    shown = [column for group in comparison.groups for column in shown_columns(comparison, group)]
    values = {
        "comparison": comparison,
        "title": _title(comparison),
        "groups": groups,
        "printed": printed(charts),
        "unranked": [entry for entry in comparison.entries if entry.group is None],
        "floors": [
            floor_text(floor, column)
            for floor in comparison.floors
            if (column := comparison.column(floor.column)) in shown
        ],
        "notes": [*comparison.notes, *left_out_lines(comparison)],
        "protocols": footnotes(list(dict.fromkeys(column.protocol for column in shown))),
        "machines": list(dict.fromkeys(entry.device for entry in comparison.entries if entry.device)),
    }
    return render("comparison.html.j2", charts, values)


def _title(comparison: Comparison) -> str:
    models = list(dict.fromkeys(entry.model for entry in comparison.entries))
    of = models[0] if len(models) == 1 else f"{len(models)} models"
    return f"{len(comparison.entries)} artifacts of {REVISION.sub('', of)}"


def _ranked(comparison: Comparison, index: int, picks: Mapping[str, Scorecard]) -> Ranked:
    group = comparison.groups[index]
    metrics = shown_columns(comparison, group)
    entries = [comparison.entry(label) for label in group.entries]
    pick = next((entry for entry in entries if entry.pick), None)
    heads = [Column("artifact", words=True), Column("stands", words=True), Column("gates", words=True)]
    heads += [Column("required", words=True)] if comparison.require else []
    return Ranked(
        group,
        f"Group {index + 1}" if len(comparison.groups) > 1 else "All of them",
        [_tile(pick, metric) for metric in metrics[:6]] if pick else [],
        [*heads, *(Column(heading(metric)) for metric in metrics)],
        [*_unmodified(comparison, group, metrics), *(_row(comparison, each, metrics) for each in entries[:MOST_ROWS])],
        max(0, len(entries) - MOST_ROWS),
        tradeoffs(comparison, group, f"against-{index}"),
        differences(comparison, group, f"beside-{index}"),
        compared_with(group),
        command(picks[pick.label]) if pick and pick.label in picks else "",
        axes=" and ".join(comparison.column(key).title for key in group.axes),
        bests=bests_text(comparison, group),
    )


def _tile(entry: Entry, metric: Metric) -> dict[str, str]:
    text = cell_text(entry.cell(metric.key), metric)
    number, rest = (text.ratio, text.value) if text.ratio else apart(text.value)
    change = text.change if text.change in ("better", "worse") else ""
    rest = f"{text.interval} of unmodified; {rest}" if text.ratio else f"{rest} {text.interval}"
    return {"name": metric.title, "number": number, "rest": rest.strip(), "change": change or ""}


def _row(comparison: Comparison, entry: Entry, metrics: list[Metric]) -> TableRow:
    cells = [
        Cell(f"{entry.rank}. {entry.label}" if entry.rank else entry.label, small=", ".join(recipe_lines(entry))),
        Cell(standing(entry), kind="words"),
        Cell(str(entry.verdict) if entry.gated else "-", kind=f"words {entry.verdict if entry.gated else ''}"),
    ]
    if comparison.require:
        kept = Verdict.PASS
        why = "; ".join(f"{each.key} {each.limit}" for each in entry.requirements if each.verdict is not kept)
        cells.append(Cell(str(entry.meets), kind=f"words {entry.meets}", small=why))
    for metric in metrics:
        cell = entry.cell(metric.key)
        text = cell_text(cell, metric)
        change = text.change if text.change in ("better", "worse") else ""
        small = " ".join(part for part in (text.ratio, text.interval) if part)
        cells.append(Cell(text.value, cell.value if cell else None, change or "", small, number=True))
    return TableRow(tuple(cells), "pick" if entry.pick else "")


def _unmodified(comparison: Comparison, group: Group, metrics: list[Metric]) -> list[TableRow]:
    texts = unmodified_cells(comparison, group, metrics)
    if texts is None:
        return []
    empty: list[Any] = [Cell("", kind="words")] * (3 if comparison.require else 2)
    return [TableRow((Cell(UNMODIFIED), *empty, *(Cell(text.value, None, number=True) for text in texts)), "bare")]
