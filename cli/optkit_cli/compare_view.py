"""A comparison on the terminal: a table for each group, the reason, and what must be known beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from optkit.comparison import Column, Comparison, Entry, Floor, Group
from optkit.comparison import table as tables
from optkit.recipe.gates import Verdict
from optkit.scorecard.scorecard import GateResult
from optkit_cli.tables import VERDICT_STYLES, fits, indented, plain_table, spaced

STYLES = {"better": "green", "worse": "", "none": "dim", None: ""}
MOST_LINES = 40
"""Entries of a group that are shown; `--csv` has all."""
WIDEST_NAME = 24
"""Characters of a name in a narrow table; a longer one is broken."""


def comparison_view(comparison: Comparison) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    found = list[RenderableType]()
    for index, group in enumerate(comparison.groups):
        if len(comparison.groups) > 1:
            found += [Text(""), Text(f"group {index + 1}", style="bold")]
            found += [Text(f"  {line}", style="dim") for line in group.differs]
        found += [Text(""), Numbers(comparison, group)]
        if len(group.entries) > MOST_LINES:
            found.append(Text(f"and {len(group.entries) - MOST_LINES} more, in --csv and --json", style="dim"))
        found += [Text(""), _verdict(group)]
        if bests := tables.bests_text(comparison, group):
            found.append(Text(f"of those that pass, if one thing alone counts: {bests}", style="dim"))
        lines = [(each.label, tables.beside_first(comparison, each)) for each in _entries(comparison, group)]
        beside = indented([line for line in lines if line[1]])
        if beside is not None:
            found += [Text(""), Text(f"beside {tables.compared_with(group)}"), beside]
    warned = [("act on", line) for line in tables.warning_lines(comparison)]
    notes = [("note", line) for line in (*comparison.notes, *tables.left_out_lines(comparison))]
    notes += [("noise", tables.floor_text(floor, comparison.column(floor.column))) for floor in _floors(comparison)]
    protocols = [(f"[{number}]", line) for number, line in enumerate(tables.protocol_lines(comparison), start=1)]
    words = Text(tables.legend(comparison, *comparison.groups), style="dim")
    return found + spaced(indented(warned), indented(protocols), indented(notes), words)


@dataclass(frozen=True)
class Numbers:
    """The table of a group: a line for each scorecard if the terminal is wide enough, else two or three."""

    comparison: Comparison
    group: Group

    @cached_property
    def _columns(self) -> list[Column]:
        return tables.shown_columns(self.comparison, self.group)

    @cached_property
    def _unmodified(self) -> list[tables.CellText]:
        """What is known of the unmodified model, for each column; empty for nothing."""
        return tables.unmodified_cells(self.comparison, self.group, self._columns) or []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the axes with as many further columns as fit: on one line, else in several."""
        further = len(self._columns) - len(self.group.axes)
        for draw in (self._wide, self._narrow):
            table = draw()
            for _ in range(further):
                if fits(table, console, options):
                    break
                table.columns.pop()
            if fits(table, console, options):
                break
        yield table

    def _wide(self) -> Table:
        required = bool(self.comparison.require)
        heads = ("", "stands", "gates", *(("required",) if required else ()))
        table = plain_table(*heads, *map(self._head, self._columns))
        for name, entry, cells in self._lines():
            about = [Text(tables.standing(entry)), _gates(entry, " ")] if entry else [Text(""), Text("")]
            if required:
                about.append(_judged(entry.meets, entry.requirements, " ") if entry else Text(""))
            table.add_row(name, *about, *(_cell(each, " ") for each in cells))
        return table

    def _narrow(self) -> Table:
        table = plain_table("", *map(self._head, self._columns))
        table.columns[0].max_width, table.columns[0].overflow = WIDEST_NAME, "fold"
        for name, entry, cells in self._lines():
            if entry:
                name.append(f"\n{tables.standing(entry)}", style="dim")
                if entry.gated:
                    name.append("\ngates ", style="dim").append(_gates(entry, "\n"))
                if self.comparison.require:
                    name.append("\nrequired ", style="dim").append(_judged(entry.meets, entry.requirements, "\n"))
            table.add_row(name, *(_cell(each, "\n") for each in cells))
        return table

    def _head(self, column: Column) -> str:
        lines = [
            tables.heading(column).replace("[", "\n[").replace(",", "\n"),
            *tables.limits(self.comparison, self.group, column),
        ]
        return ">" + "\n".join(lines)

    def _lines(self) -> Iterator[tuple[Text, Entry | None, list[tables.CellText]]]:
        if self._unmodified:
            yield Text(tables.UNMODIFIED, style="dim"), None, self._unmodified
        for entry in _entries(self.comparison, self.group):
            name = Text(entry.label, style="bold" if entry.pick else "")
            yield name, entry, [tables.cell_text(entry.cell(each.key), each) for each in self._columns]


def _entries(comparison: Comparison, group: Group) -> list[Entry]:
    return comparison.members(group)[:MOST_LINES]


def _cell(cell: tables.CellText, gap: str) -> Text:
    text = Text(cell.value)
    if cell.ratio:
        text.append(f" {cell.ratio}", style=STYLES[cell.change])
    return text.append(f"{gap}{cell.interval}" if cell.interval else "", style="dim")


def _judged(verdict: Verdict, limits: Sequence[GateResult], gap: str) -> Text:
    text = Text(str(verdict), style=VERDICT_STYLES[verdict])
    return Text.assemble(text, (f"{gap}{names}" if (names := tables.not_kept(limits)) else "", "dim"))


def _gates(entry: Entry, gap: str) -> Text:
    return _judged(entry.verdict, entry.gates, gap) if entry.gated else Text("-")


def _verdict(group: Group) -> Text:
    return Text.assemble(("pick  " if group.pick else "no pick  ", "dim"), (group.why, "bold"))


def _floors(comparison: Comparison) -> list[Floor]:
    shown = {column.key for column in tables.all_shown(comparison)}
    return [floor for floor in comparison.floors if floor.column in shown]
