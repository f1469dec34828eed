"""The one look of all tables: no lines, numbers to the right, colour only if it says something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from optkit.common import byte_sizes
from optkit_cli.output import UNBOUNDED

VERDICT_STYLES = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow", "SKIPPED": "dim"}


class WholeWords(Table):
    """A table that neither breaks nor cuts a word, nor a cell of a column that is not wrapped: it is wider then."""

    def add_column(self, header: Text | str = "", **settings: Any) -> None:  # type: ignore[override]
        super().add_column(_text(header), **settings)
        _make_room(self.columns[-1], _text(header))

    def add_row(self, *cells: Any, **settings: Any) -> None:
        texts = [_text(cell) for cell in cells]
        super().add_row(*texts, **settings)
        for column, text in zip(self.columns, texts, strict=False):
            _make_room(column, text)


def _make_room(column: Column, text: Text) -> None:
    parts = text.plain.splitlines() if column.no_wrap else text.plain.split()
    column.min_width = max(column.min_width or 0, *map(cell_len, parts), 0)


def plain_table(*heads: str, rows: Iterable[Iterable[Text | str]] = (), space: int = 2) -> Table:
    """Return a table with `space` columns after each of its own.
    A head that begins with `>` is that of numbers, which stand to the right.
    """
    table = WholeWords(box=None, pad_edge=False, padding=(0, space, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    return table


def definition_list(pairs: Sequence[tuple[Text | str, Text | str]]) -> Table:
    """Return two columns without a head: a word, and its meaning wrapped below itself."""
    grid = WholeWords(box=None, padding=(0, 2), collapse_padding=True, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for word, meaning in pairs:
        grid.add_row(word, meaning)
    return grid


def indented(pairs: Sequence[tuple[Text | str, str | Text]]) -> Table | None:
    """Return a definition list below a heading, its words dim; None for nothing."""
    if not pairs:
        return None
    words = [word if isinstance(word, Text) else Text(word, style="dim") for word, _ in pairs]
    return definition_list(
        [(Text("  ").append(word), meaning) for word, (_, meaning) in zip(words, pairs, strict=True)]
    )


def fits(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Say whether a table needs no more than the columns that are there."""
    return Measurement.get(console, options.update(width=UNBOUNDED), table).maximum <= options.max_width


Line = TypeVar("Line")


def grouped(lines: Sequence[Line], metric: Callable[[Line], str]) -> list[tuple[str, Line | None]]:
    """Return each line with its label, those of one metric together where the first of them stood.

    `metric` gives `name, batch 1, prompt 128` for a line. A name that several lines have stands
    alone above them (with None), and each of them keeps only what tells it from the others: `
    batch 1`.
    """
    names = [metric(line).partition(", ")[0] for line in lines]
    shown: list[tuple[str, Line | None]] = []
    for name in dict.fromkeys(names):
        alike = [line for line, its_name in zip(lines, names, strict=True) if its_name == name]
        labels = [metric(line).split(", ")[1:] for line in alike]
        if len(alike) == 1:
            shown.append((name, alike[0]))
            continue
        shared = set(labels[0]).intersection(*labels[1:])
        shown.append((name, None))
        shown += [
            ("  " + ", ".join(part for part in its if part not in shared), line)
            for its, line in zip(labels, alike, strict=True)
        ]
    return shown


def spaced(*sections: RenderableType | None) -> list[RenderableType]:
    """Return sections with an empty line above each; None is none."""
    return [part for section in sections if section is not None for part in (Text(""), section)]


def heading(text: str) -> Text:
    """Return the title of a section."""
    return Text(f"\n{text}", style="bold")


def duration_text(seconds: float) -> str:
    """Return e.g. `45 s`, `12 min`, `3.5 h`."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def size_text(size_bytes: int) -> str:
    """Return e.g. `538 MB`; `-` for nothing."""
    return byte_sizes.size_text(size_bytes) if size_bytes else "-"


def verdict_text(verdict: str) -> Text:
    """Return PASS, FAIL, INCONCLUSIVE or SKIPPED in its colour."""
    return Text(verdict, style=VERDICT_STYLES[verdict])


def _text(cell: Text | str) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
