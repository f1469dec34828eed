"""report.html: several scorecards, and which of them to take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.comparison import Column as Metric
from optkit.comparison import Comparison, Entry, Group
from optkit.comparison import table as tables
from optkit.page.charts.chart import Chart, printed
from optkit.page.charts.differences import differences
from optkit.page.charts.tradeoffs import tradeoffs
from optkit.page.command import command
from optkit.page.render import render
from optkit.page.table import Cell, Column, TableRow, apart
from optkit.recipe.gates import Verdict
from optkit.scorecard import Scorecard
from optkit.scorecard.scorecard import GateResult

MOST_ROWS = 100
"""Of a group's table, by rank; `optkit compare --csv` has all."""
REVISION = re.compile(r"@[^@/]*$")


@dataclass(frozen=True)
class Ranked:
    """What can be ranked together, as the page shows it."""

    group: Group
    title: str
    why: str
    """What follows the name of the pick in a sentence."""
    tiles: list[dict[str, str]]
    tiles_title: str
    columns: list[Column]
    unmodified: TableRow | None
    rows: list[TableRow]
    more: int
    """Entries that the table leaves out."""
    tradeoffs: list[Chart]
    differences: list[Chart]
    beside: str
    """Whom the differences are to."""
    command: str
    """What makes the pick."""
    legend: str
    """What the table's words and signs mean."""
    bests: str
    """Which one to take if one of the axes alone counts."""


def comparison_page(comparison: Comparison, picks: Mapping[str, Scorecard] | None = None) -> str:
    """Return the page of a comparison. `picks` are scorecards by their labels, for the commands."""
    groups = [_ranked(comparison, index, picks or {}) for index in range(len(comparison.groups))]
    charts = [chart for each in groups for chart in (*each.differences, *each.tradeoffs)]
    values = {
        "comparison": comparison,
        "title": _title(comparison),
        "groups": groups,
        "printed": printed(charts),
        "unranked": [entry for entry in comparison.entries if entry.group is None],
        "floors": [
            tables.floor_text(floor, column)
            for floor in comparison.floors
            if (column := comparison.column(floor.column)) in tables.all_shown(comparison)
        ],
        "notes": [*comparison.notes, *tables.left_out_lines(comparison)],
        "warnings": tables.warning_lines(comparison),
        "protocols": tables.protocol_lines(comparison),
        "machines": list(dict.fromkeys(entry.device for entry in comparison.entries if entry.device)),
    }
    return render("comparison.html.j2", charts, values)


def _title(comparison: Comparison) -> str:
    models = list(dict.fromkeys(entry.model for entry in comparison.entries))
    of = models[0] if len(models) == 1 else f"{len(models)} models"
    return f"{len(comparison.entries)} artifacts of {REVISION.sub('', of)}"


def _ranked(comparison: Comparison, index: int, picks: Mapping[str, Scorecard]) -> Ranked:
    group = comparison.groups[index]
    metrics = tables.shown_columns(comparison, group)
    entries = comparison.members(group)
    pick = next((entry for entry in entries if entry.pick), None)
    names = _setting_names(entries)
    settings = list(dict.fromkeys(names.values()))
    said = (", ".join(settings),) if settings else ()
    heads = [Column("artifact", words=True, small=said), Column("stands", words=True), Column("gates", words=True)]
    heads += [Column("required", words=True)] if comparison.require else []
    return Ranked(
        group,
        f"Group {index + 1}" if len(comparison.groups) > 1 else "All of them",
        _why(group),
        [_tile(pick, metric) for metric in metrics[:6]] if pick else [],
        f"{pick.label} beside {_whom(comparison, group, metrics)}" if pick else "",
        [*heads, *(_head(comparison, group, metric) for metric in metrics)],
        _unmodified(comparison, group, metrics),
        [_row(comparison, each, metrics, names) for each in entries[:MOST_ROWS]],
        max(0, len(entries) - MOST_ROWS),
        tradeoffs(comparison, group, f"against-{index}"),
        differences(comparison, group, f"beside-{index}"),
        tables.compared_with(group),
        command(picks[pick.label]) if pick and pick.label in picks else "",
        legend=tables.legend(comparison, group),
        bests=tables.bests_text(comparison, group),
    )


def _whom(comparison: Comparison, group: Group, metrics: list[Metric]) -> str:
    size = next(
        (text.interval for text in tables.unmodified_cells(comparison, group, metrics) or () if text.interval), ""
    )
    return f"the unmodified model ({size})" if size else "the unmodified model"


def _tile(entry: Entry, metric: Metric) -> dict[str, str]:
    text = tables.cell_text(entry.cell(metric.key), metric)
    number, rest = (text.ratio, text.value) if text.ratio else apart(text.value)
    change = text.change if text.change in ("better", "worse") else ""
    rest = f"{text.interval} of unmodified; {rest}" if text.ratio else f"{rest} {text.interval}"
    return {"name": metric.title, "number": number, "rest": rest.strip(), "change": change or ""}


def _why(group: Group) -> str:
    """Return the reason without the name of the pick at its beginning."""
    if not group.why:
        return ": it is the only one"
    rest = group.why.removeprefix(f"{group.pick} ")
    return f" {rest}" if rest.startswith("over ") else f": it {rest}"


def _head(comparison: Comparison, group: Group, metric: Metric) -> Column:
    protocols = list(dict.fromkeys(column.protocol for column in tables.all_shown(comparison)))
    number = f"[{protocols.index(metric.protocol) + 1}]"
    return Column(tables.heading(metric), small=(number, *tables.limits(comparison, group, metric)))


def _setting_names(entries: Sequence[Entry]) -> dict[str, str]:
    """Return path -> name of each field in which recipes differ.
    A name has the stage's place only if several stages have such a field, and never its kind.
    """
    parts = {
        path: re.fullmatch(r"(?:(stages\.\d+)(?:\.\w+\.)?)?(.*)", path) for each in entries for path in each.fields
    }
    places = {path: (found[1] or "", found[2]) for path, found in parts.items() if found}
    alike = Counter(field for _, field in set(places.values()))
    return {
        path: field or "stage" if alike[field] == 1 else ".".join(filter(None, (place, field)))
        for path, (place, field) in places.items()
    }


def _row(comparison: Comparison, entry: Entry, metrics: list[Metric], names: Mapping[str, str]) -> TableRow:
    own = {names[path]: tables.field_text(value) for path, value in entry.fields.items()}
    said = ", ".join(own.get(name, "-") for name in dict.fromkeys(names.values()))
    cells = [
        Cell(f"{entry.rank}. {entry.label}" if entry.rank else entry.label, small=said),
        Cell(tables.standing(entry, lambda better: str(comparison.entry(better).rank)), kind="words"),
        _judged(entry.verdict, entry.gates) if entry.gated else Cell("-", kind="words"),
    ]
    if comparison.require:
        cells.append(_judged(entry.meets, entry.requirements))
    for metric in metrics:
        cell = entry.cell(metric.key)
        text = tables.cell_text(cell, metric)
        change = text.change if text.change in ("better", "worse") else ""
        small = " ".join(part for part in (text.ratio, text.interval.replace(" ", "\N{NO-BREAK SPACE}")) if part)
        cells.append(Cell(text.value, cell.value if cell else None, change or "", small, number=True))
    return TableRow(tuple(cells), "pick" if entry.pick else "")


def _judged(verdict: Verdict, limits: Sequence[GateResult]) -> Cell:
    return Cell(str(verdict), kind=f"words {verdict}", small=tables.not_kept(limits))


def _unmodified(comparison: Comparison, group: Group, metrics: list[Metric]) -> TableRow | None:
    texts = tables.unmodified_cells(comparison, group, metrics)
    if texts is None:
        return None
    empty: list[Any] = [Cell("", kind="words")] * (3 if comparison.require else 2)
    numbers = (Cell(text.value, None, number=True, small=text.interval) for text in texts)
    return TableRow((Cell(tables.UNMODIFIED), *empty, *numbers), "bare")
