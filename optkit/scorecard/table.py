"""A scorecard as rows of text.
The terminal and the Markdown are drawn from the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optkit.measure import Metric
from optkit.recipe.gates import OTHERS, Of, Verdict, overall
from optkit.scorecard.numbers import format_ratio, format_value
from optkit.scorecard.scorecard import GateResult, Measured, Scorecard

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
    of: Of = "baseline"
    """Whose number stands in the column of the baseline."""
    gates: tuple[GateResult, ...] = ()
    """Those that `gate` says."""
    values: tuple[float | None, float | None, float | None] = (None, None, None)
    """What `ratio`, `baseline` and `artifact` stand for, to sort by."""


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
            f"as [{known}]{' up to its first semicolon' if '; ' in protocols[known - 1] else ''}; {rest}"
            if known < number and 0 < len(rest) < len(shared)
            else protocol
        )
    return shown


def table_rows(scorecard: Scorecard) -> list[Row]:
    """Return the lines of a scorecard's table: one for each number, and below it one for each
    further model that it is put beside. Of the same engine those are rates, and what a gate is about.
    """
    numbers = {protocol: number for number, protocol in enumerate(protocols(scorecard), start=1)}
    return [line for row in scorecard.rows for line in _lines(row, numbers[row.metric.protocol])]


def _lines(row: Measured, protocol: int) -> Iterator[Row]:
    further = {of: [gate for gate in row.gates if gate.of == of] for of in OTHERS}
    first = [gate for gate in row.gates if gate.of not in further]
    yield _line(row, row.metric, "baseline", row.baseline, (row.ratio, row.ratio_interval), first, protocol)
    for of, gates in further.items():
        other = next((each for each in row.beside if each.of == of), None)
        told = other and (of != "same engine" or row.metric.unit == "tokens/s")
        if told or gates:
            ratio = (other.ratio, other.ratio_interval) if other else (None, None)
            yield _line(row, None, of, other.metric if other else None, ratio, gates, protocol)


def _line(
    row: Measured,
    metric: Metric | None,
    of: Of,
    other: Metric | None,
    ratio: tuple[float | None, tuple[float, float] | None],
    gates: Sequence[GateResult],
    protocol: int,
) -> Row:
    """Return a line of a number beside that of another model; its own number is in the first."""
    return Row(
        metric=metric_label(row.metric) + (f" of {of}" if metric is None else ""),
        baseline=_value(other) if other else NOTHING,
        artifact=_value(metric) if metric else "",
        ratio=format_ratio(ratio[0], ratio[1]) if ratio[0] is not None else NOTHING,
        change=change_of(*ratio, row.metric.higher_is_better),
        gate=", ".join(f"{gate.limit} {gate.verdict}" + (f" ({gate.why})" if gate.why else "") for gate in gates)
        or NOTHING,
        verdict=overall([gate.verdict for gate in gates]) if gates else None,
        protocol=protocol,
        of=of,
        gates=tuple(gates),
        values=(ratio[0], _number(other), _number(metric)),
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


def _number(metric: Metric | None) -> float | None:
    return None if metric is None or metric.failure else metric.value


def _value(metric: Metric) -> str:
    return FAILED if metric.failure else format_value(metric.value, metric.unit, metric.interval)


def change_of(
    ratio: float | None, interval: tuple[float, float] | None, higher_is_better: bool
) -> Literal["better", "worse", ""]:
    """Return what a ratio says beyond its interval; empty if that is not known."""
    low, high = interval or (ratio, ratio)
    if low is None or high is None or low <= 1 <= high:
        return ""
    return "better" if (low > 1) == higher_is_better else "worse"
