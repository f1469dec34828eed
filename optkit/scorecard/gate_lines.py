"""The gates of a scorecard one by one, as a pipeline reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optkit.recipe.gates import Verdict, metric_key
from optkit.scorecard.numbers import format_ratio, format_value
from optkit.scorecard.scorecard import GateResult, Measured, Scorecard


@dataclass(frozen=True)
class GateLine:
    """One limit, and one number that it is set to."""

    key: str
    """The gate's key in the recipe."""
    row: str
    """The number's name with all its labels."""
    limit: str
    verdict: Verdict
    said: str
    """The number, its interval, and what it lies beside; or why there is none."""
    protocol: str


def gate_lines(scorecard: Scorecard) -> Iterator[GateLine]:
    """Yield every limit with each number that it is set to, in the order of the rows."""
    for row in scorecard.rows:
        for gate in row.gates:
            name = metric_key(row.metric.name, row.metric.labels)
            yield GateLine(gate.key, name, gate.limit, gate.verdict, _said(row, gate), row.metric.protocol)


def _said(row: Measured, gate: GateResult) -> str:
    number = row.number(gate.of)
    if gate.why or number is None:
        return gate.why
    if gate.of:
        return f"{format_ratio(number.value, number.interval)} of {gate.of}"
    value, *ends = (format_value(each, row.metric.unit) for each in (number.value, *(number.interval or ())))
    return f"{value} [{', '.join(ends)}]" if ends else value
