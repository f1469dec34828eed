"""Several scorecards on the terminal: a column for each artifact where they fit, else a line for each."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from optkit.scorecard import Comparison
from optkit_cli.tables import definition_list, fits, indented, plain_table


def comparison_view(comparison: Comparison) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    footnotes = indented([(f"[{number}]", line) for number, line in enumerate(comparison.protocols, start=1)])
    parts = (SideBySide(comparison), footnotes, Text("x: ratio to the artifact's own unmodified model", style="dim"))
    return [each for part in parts if part is not None for each in (Text(""), part)]


@dataclass(frozen=True)
class SideBySide:
    """The numbers."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the artifacts as columns where they fit, else as lines below each metric."""
        wide = self._columns()
        yield wide if fits(wide, console, options) else self._lines()

    def _columns(self) -> Table:
        table = plain_table(("", "left"), *((name, "right") for name in self.comparison.columns))
        for row in self.comparison.rows:
            table.add_row(_label(row.metric, row.protocol), *map(Text, row.cells))
        return table

    def _lines(self) -> Table:
        pairs: list[tuple[Text | str, Text | str]] = []
        for row in self.comparison.rows:
            pairs.append((_label(row.metric, row.protocol), ""))
            pairs += [(f"  {name}", cell) for name, cell in zip(self.comparison.columns, row.cells, strict=True)]
        return definition_list(pairs)


def _label(metric: str, protocol: int) -> Text:
    return Text.assemble(metric, (f" [{protocol}]", "dim"))
