"""A table that a page sorts and filters: texts to read, the numbers behind them, and short names of metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optkit.measure import Metric
from optkit.scorecard import metric_label


def apart(shown: str) -> tuple[str, str]:
    """Return a number and its unit; a percent sign stays with the number."""
    number, _, unit = shown.partition(" ")
    return (shown, "") if unit == "%" else (number, unit)


@dataclass(frozen=True)
class Column:
    """A column's head."""

    title: str
    words: bool = False
    """It holds texts and no numbers: aligned to the left."""
    small: tuple[str, ...] = ()
    """Lines below it."""


@dataclass(frozen=True)
class Cell:
    """A text, and what it is sorted by."""

    text: str
    number_value: float | None = None
    kind: str = ""
    """Its classes in page.css."""
    small: str = ""
    number: bool = False
    """It stands in a column of numbers: without one it is sorted behind all others."""

    @property
    def value(self) -> str | None:
        """What the script sorts by; None: by the text."""
        if not self.number:
            return None
        return "" if self.number_value is None else repr(float(self.number_value))


@dataclass(frozen=True)
class TableRow:
    """A row; the first cell names it."""

    cells: tuple[Cell, ...]
    kind: str = ""


class Titles:
    """Names of the metrics of one page."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._values: dict[str, dict[str, set[str]]] = {}
        for metric in metrics:
            for label, value in metric.labels.items():
                self._values.setdefault(metric.name, {}).setdefault(label, set()).add(str(value))

    def __call__(self, metric: Metric) -> str:
        """Return e.g. `decode_tokens_per_s`, or `decode_tokens_per_s, batch 8` if there are several batches."""
        values = self._values.get(metric.name, {})
        telling = {label: value for label, value in metric.labels.items() if len(values[label]) > 1}
        return metric_label(metric.model_copy(update={"labels": telling}))
