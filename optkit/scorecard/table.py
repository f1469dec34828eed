"""A scorecard, or several of them, as rows of text.
The terminal and the Markdown are drawn from the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from optkit.common.markdown import markdown_table
from optkit.measure import Metric
from optkit.recipe.gates import Verdict, overall
from optkit.scorecard.numbers import format_ratio, format_value
from optkit.scorecard.scorecard import Measured, Scorecard

NOTHING = "-"
FAILED = "failed"
"""What could not be measured; the notes say why."""


@dataclass(frozen=True)
class Row:
    """One line of a scorecard's table; `-` for nothing."""

    metric: str
    """Name and labels, e.g. `decode_tokens_per_s, batch 1, prompt 128`."""
    baseline: str
    artifact: str
    ratio: str
    change: Literal["better", "worse", ""]
    """What the ratio says beyond its interval; empty if it is not known."""
    gate: str
    """`<= 1.10x PASS`, several joined with `, `."""
    verdict: Verdict | None
    """The worst of its gates."""
    protocol: int
    """Number of its footnote in `protocols(scorecard)`, from 1."""


@dataclass(frozen=True)
class ComparisonRow:
    """One metric, measured by one protocol, over all scorecards."""

    metric: str
    cells: tuple[str, ...]
    """One for each column: value and ratio to that artifact's own baseline, `-` if it was not
    measured by this protocol.
    """
    protocol: int


@dataclass(frozen=True)
class Comparison:
    """Several scorecards side by side."""

    columns: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]
    protocols: tuple[str, ...]

    def to_markdown(self) -> str:
        """Return the table with its protocols as numbered footnotes."""
        body = [(f"{row.metric} [{row.protocol}]", *row.cells) for row in self.rows]
        return (
            f"{markdown_table(('metric', *self.columns), body)}\n\nProtocols\n\n{numbered(footnotes(self.protocols))}\n"
        )


def protocols(*scorecards: Scorecard) -> tuple[str, ...]:
    """Return the protocols of all numbers, each once, in the order of the rows."""
    return tuple(dict.fromkeys(row.metric.protocol for scorecard in scorecards for row in scorecard.rows))


def footnotes(protocols: Sequence[str]) -> list[str]:
    """Return the protocols as they are printed.
    If most of one, up to its first `; `, is that of an earlier one, it refers to that.
    """
    first: dict[str, int] = {}
    shown = []
    for number, protocol in enumerate(protocols, start=1):
        shared, _, rest = protocol.partition("; ")
        known = first.setdefault(shared, number)
        shown.append(
            f"as [{known}] up to its first semicolon; {rest}"
            if known < number and 0 < len(rest) < len(shared)
            else protocol
        )
    return shown


def table_rows(scorecard: Scorecard) -> list[Row]:
    """Return the lines of a scorecard's table."""
    numbers = {protocol: number for number, protocol in enumerate(protocols(scorecard), start=1)}
    return [
        Row(
            metric=metric_label(row.metric),
            baseline=_value(row.baseline) if row.baseline else NOTHING,
            artifact=_value(row.metric),
            ratio=format_ratio(row.ratio, row.ratio_interval) if row.ratio is not None else NOTHING,
            change=_change(row),
            gate=", ".join(
                f"{gate.limit} {gate.verdict}" + (f" ({gate.why})" if gate.why else "") for gate in row.gates
            )
            or NOTHING,
            verdict=overall([gate.verdict for gate in row.gates]) if row.gates else None,
            protocol=numbers[row.metric.protocol],
        )
        for row in scorecard.rows
    ]


def compare_table(scorecards: Sequence[Scorecard]) -> Comparison:
    """Return scorecards side by side; numbers of different protocols never share a row."""
    notes = protocols(*scorecards)
    found: dict[tuple[str, str], dict[int, Measured]] = {}
    for column, scorecard in enumerate(scorecards):
        for row in scorecard.rows:
            found.setdefault((metric_label(row.metric), row.metric.protocol), {})[column] = row
    labels = list(dict.fromkeys(label for label, _ in found))
    return Comparison(
        columns=_column_names(scorecards),
        rows=tuple(
            ComparisonRow(
                label, tuple(_cell(rows.get(column)) for column in range(len(scorecards))), notes.index(protocol) + 1
            )
            for (label, protocol), rows in sorted(found.items(), key=lambda item: labels.index(item[0][0]))
        ),
        protocols=notes,
    )


def metric_label(metric: Metric) -> str:
    """Return a metric's name and labels, e.g. `decode_tokens_per_s, batch 1, prompt 128`."""
    return ", ".join([metric.name, *(f"{label.replace('_', ' ')} {value}" for label, value in metric.labels.items())])


def numbered(lines: Sequence[str]) -> str:
    """Return a numbered Markdown list."""
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))


def value_text(metric: Metric) -> str:
    """Return a metric's value with its unit and without its interval, or that there is none."""
    return FAILED if metric.failure else format_value(metric.value, metric.unit)


def _value(metric: Metric) -> str:
    return FAILED if metric.failure else format_value(metric.value, metric.unit, metric.interval)


def _cell(row: Measured | None) -> str:
    if row is None:
        return NOTHING
    return _value(row.metric) if row.ratio is None else f"{_value(row.metric)} ({format_ratio(row.ratio)})"


def _change(row: Measured) -> Literal["better", "worse", ""]:
    low, high = row.ratio_interval or (row.ratio, row.ratio)
    if low is None or high is None or low <= 1 <= high:
        return ""
    return "better" if (low > 1) == row.metric.higher_is_better else "worse"


def _column_names(scorecards: Sequence[Scorecard]) -> tuple[str, ...]:
    names = [scorecard.name for scorecard in scorecards]
    return tuple(
        scorecard.name if names.count(scorecard.name) == 1 else f"{scorecard.name} {scorecard.artifact_key[:8]}"
        for scorecard in scorecards
    )
