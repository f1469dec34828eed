"""Several scorecards on the terminal: a column for each artifact if they fit, else a line for each."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from optkit.scorecard import Comparison, ComparisonRow, footnotes
from optkit_cli.tables import definition_list, fits, grouped, indented, plain_table


def comparison_view(comparison: Comparison) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    notes = indented([(f"[{number}]", line) for number, line in enumerate(footnotes(comparison.protocols), start=1)])
    parts = (SideBySide(comparison), notes, Text("x: ratio to the artifact's own unmodified model", style="dim"))
    return [each for part in parts if part is not None for each in (Text(""), part)]


@dataclass(frozen=True)
class SideBySide:
    """The numbers."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the artifacts as columns if they fit, else as lines below each metric."""
        wide = self._columns()
        yield wide if fits(wide, console, options) else self._blocks()

    def _columns(self) -> Table:
        table = plain_table(("", "left"), *((name, "right") for name in self.comparison.columns))
        for label, row in self._lines():
            table.add_row(label, *(Text(cell) for cell in (row.cells if row else ())))
        return table

    def _blocks(self) -> Table:
        pairs: list[tuple[Text | str, Text | str]] = []
        for label, row in self._lines():
            pairs.append((label, ""))
            cells = zip(self.comparison.columns, row.cells, strict=True) if row else ()
            pairs += [(f"    {name}", cell) for name, cell in cells]
        return definition_list(pairs)

    def _lines(self) -> list[tuple[Text, ComparisonRow | None]]:
        lines = grouped(self.comparison.rows, metric=lambda row: row.metric)
        return [
            (Text(label) if row is None else Text.assemble(label, (f" [{row.protocol}]", "dim")), row)
            for label, row in lines
        ]
