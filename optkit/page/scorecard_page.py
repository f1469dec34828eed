"""scorecard.html: the same record as scorecard.json, drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.common.byte_sizes import size_text
from optkit.page.answers import answers
from optkit.page.charts.chart import Chart, printed
from optkit.page.charts.layers import layers
from optkit.page.charts.losses import losses
from optkit.page.charts.memory import memory
from optkit.page.charts.ratios import ratios
from optkit.page.charts.roofline import roofline
from optkit.page.charts.timings import timings
from optkit.page.charts.waterfalls import damage, speed
from optkit.page.command import command
from optkit.page.render import render
from optkit.page.table import Cell, Column, TableRow, Titles, apart
from optkit.recipe.gates import Verdict
from optkit.scorecard import (
    Measured,
    Scorecard,
    change_of,
    first_rows,
    footnotes,
    format_ratio,
    format_value,
    loading_cells,
    loading_columns,
    loading_notes,
    other_notes,
    protocols,
    table_rows,
    to_act_on,
    value_text,
)
from optkit.scorecard.scorecard import StepLine

SECTIONS = (
    ("What changed", (ratios,)),
    ("Quality, stage by stage", (damage,)),
    ("Speed", (speed, timings, roofline)),
    ("Memory", (memory,)),
    ("Layers", (layers,)),
    ("Training", (losses,)),
)
"""Headings, and what gives the charts below each; a heading without charts is left out."""
COLUMNS = (
    Column("metric", words=True),
    Column("ratio [95%]"),
    Column("unmodified"),
    Column("artifact"),
    Column("gate", words=True),
)


@dataclass(frozen=True)
class Section:
    """Charts below one heading."""

    title: str
    charts: tuple[Chart, ...]


def scorecard_page(scorecard: Scorecard, directory: Path | None = None) -> str:
    """Return the page of a scorecard. The files that it lists lie below `directory`."""
    found = ((title, tuple(chart for draw in drawn for chart in draw(scorecard))) for title, drawn in SECTIONS)
    sections = [Section(title, charts) for title, charts in found if charts]
    charts = [chart for section in sections for chart in section.charts]
    titles = Titles(row.metric for row in scorecard.rows)
    gated = [row for row in scorecard.rows if row.gates]
    columns = loading_columns(scorecard.loading)
    values = {
        "card": scorecard,
        "verdict": str(scorecard.verdict) if gated else "no gates",
        "summary": _summary(scorecard),
        "model": scorecard.model_name,
        "device": scorecard.environment.get("device_name", scorecard.environment.get("device", "")),
        "gates": list(_gates(gated, titles)),
        "tiles": [_tile(row, titles) for row in first_rows(scorecard.rows) if not row.metric.failure],
        "columns": COLUMNS,
        "rows": _rows(scorecard),
        "sections": sections,
        "printed": printed(charts),
        "answers": answers(scorecard, directory),
        "steps": [_step(step) for step in scorecard.steps],
        "command": command(scorecard),
        "loading": {
            "columns": columns,
            "rows": [loading_cells(each, columns) for each in scorecard.loading],
            "notes": loading_notes(scorecard.loading),
        },
        "protocols": footnotes(protocols(scorecard)),
        "to_act_on": to_act_on(scorecard),
        "notes": other_notes(scorecard),
        "lineage": list(_lineage(scorecard)),
        "sizes": {each.path: size_text(each.size_bytes) for each in scorecard.files},
    }
    return render("scorecard.html.j2", charts, values)


def _summary(scorecard: Scorecard) -> str:
    verdicts = [gate.verdict for row in scorecard.rows for gate in row.gates]
    if not verdicts:
        return "No gates were set"
    passed = verdicts.count(Verdict.PASS)
    return f"{passed} of {len(verdicts)} gates pass"


def _gates(rows: Iterable[Measured], titles: Titles) -> Iterator[dict[str, str]]:
    for row in rows:
        for gate in row.gates:
            found = row.number(gate.of)
            ratio = format_ratio(found.value, found.interval) if found and gate.of else ""
            said = {"metric": titles(row.metric), "measured": ratio or value_text(row.metric)}
            yield {**said, "limit": gate.limit, "verdict": str(gate.verdict), "why": gate.why}


def _tile(row: Measured, titles: Titles) -> dict[str, str]:
    if row.ratio is None:
        number, unit = apart(format_value(row.metric.value, row.metric.unit))
        rest = format_value(row.metric.value, row.metric.unit, row.metric.interval) if row.metric.interval else unit
        return {"name": titles(row.metric), "number": number, "rest": rest, "change": ""}
    before = f"{value_text(row.baseline)} → " if row.baseline else ""
    number, _, interval_text = format_ratio(row.ratio, row.ratio_interval).partition(" ")
    rest = " ".join(text for text in (f"{before}{value_text(row.metric)}", interval_text) if text)
    return {
        "name": titles(row.metric),
        "number": number,
        "rest": rest,
        "change": change_of(row.ratio, row.ratio_interval, row.metric.higher_is_better),
    }


def _rows(scorecard: Scorecard) -> list[TableRow]:
    return [
        TableRow(
            (
                Cell(row.metric, small=f"[{row.protocol}]"),
                *(
                    Cell(text, value, number=True, kind=kind, small=kind)
                    for text, value, kind in zip(
                        (row.ratio, row.baseline, row.artifact), row.values, (row.change, "", ""), strict=True
                    )
                ),
                Cell(row.gate, kind=f"words {row.verdict or ''}".strip()),
            )
        )
        for row in table_rows(scorecard)
    ]


def _step(step: StepLine) -> dict[str, str]:
    return {
        "kind": step.kind,
        "seconds": f"{step.seconds:.1f}",
        "did": step.did,
        "cached": "yes" if step.cached else "no",
        "key": step.key[:12],
    }


def _lineage(scorecard: Scorecard) -> Iterator[tuple[str, Any]]:
    model = scorecard.recipe.get("model")
    for name, value in model.items() if isinstance(model, Mapping) else ():
        yield f"model {name}".replace("_", " "), value
    yield "artifact", scorecard.artifact_key
    for step in scorecard.steps:
        yield step.kind, step.key
    yield from scorecard.environment.items()
