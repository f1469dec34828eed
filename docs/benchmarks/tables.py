"""What was measured, as data: results/*.json, and the tables of the pages that show it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field, model_validator

from optkit.common.frozen import Frozen

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BLOCK = re.compile(r"<!-- (table|figure) (\w+) -->\n.*?<!-- end -->\n", re.DOTALL)
"""What is generated, between two comments of a page."""
WIDTH = 100


class Interval(Frozen):
    """A number with its 95% interval, or the one that the protocol names."""

    value: Decimal
    interval: tuple[Decimal, Decimal]


Value: TypeAlias = Decimal | Interval | str


class Source(Frozen):
    """What made numbers, on what, and when."""

    command: str
    """What makes them again; capital letters stand for paths."""
    by_hand: str = ""
    """How they were made if not by that very command."""
    device: str
    versions: dict[str, str]
    """Empty if they were not recorded."""
    date: date
    commit: Annotated[str, Field(pattern="^[0-9a-f]{7,40}$")]
    """Which brought the numbers into this repository."""


class Row(Frozen):
    """One line: numbers by the keys of the columns, and which source has them."""

    name: str
    source: str = ""
    """The first, if it is empty."""
    values: dict[str, Value]


class Result(Frozen):
    """One table."""

    title: str
    model: str
    protocol: str
    first: str
    """Heading of the names."""
    columns: dict[str, str]
    hidden: tuple[str, ...] = ()
    """Columns that are data alone: a table has at most five."""
    sources: Annotated[dict[str, Source], Field(min_length=1)]
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _known(self) -> Result:
        used = {self.source(row) for row in self.rows}
        if used != set(self.sources):
            raise ValueError(f"sources {sorted(set(self.sources) ^ used)} are named or used alone")
        found = {key for row in self.rows for key in row.values}
        if found != set(self.columns):
            raise ValueError(f"columns {sorted(set(self.columns) ^ found)} are named or used alone")
        return self

    def source(self, row: Row) -> str:
        """Return the name of a row's source."""
        return row.source or next(iter(self.sources))


def read_results() -> dict[str, Result]:
    """Return all results by the names of their files; numbers keep the digits that they are written with."""
    return {
        path.stem: Result.model_validate(json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal))
        for path in sorted(RESULTS.glob("*.json"))
    }


def table(name: str, result: Result) -> str:
    """Return the Markdown of a result: its protocol, its rows and what made them."""
    marks = {key: f" [{number}]" if number > 1 else "" for number, key in enumerate(result.sources, 1)}
    columns = {key: heading for key, heading in result.columns.items() if key not in result.hidden}
    lines = [f"| {' | '.join([result.first, *columns.values()])} |", "|---" * (len(columns) + 1) + "|"]
    for row in result.rows:
        mark = marks[result.source(row)]
        cells = [shown(row.values.get(key, "")) for key in columns]
        lines.append(f"| {' | '.join([row.name + mark, *cells])} |")
    said = [wrapped(f"{result.model}. {result.protocol}" if result.model else result.protocol), "", *lines, ""]
    first = next(iter(result.sources.values()))
    said += [wrapped(f"-{marks[key]} {made_by(source, first)}", "  ") for key, source in result.sources.items()]
    more = f" also have: {', '.join(result.columns[key] for key in result.hidden)}" if result.hidden else ""
    said.append(wrapped(f"- [The data](results/{name}.json){more}.", "  "))
    return "\n".join(said)


def made_by(source: Source, first: Source) -> str:
    """Return what made numbers, as a line; what is as it was for the first source is left out."""
    how = f"`{source.command}`" + (f" (by hand: {source.by_hand})" if source.by_hand else "")
    if source is first:
        return f"{how}; {conditions(source)}; {source.commit}."
    versions = [f"{name} {its}" for name, its in source.versions.items() if first.versions.get(name) != its]
    others = [
        str(its) for name in ("device", "date", "commit") if (its := getattr(source, name)) != getattr(first, name)
    ]
    return f"{'; '.join([how, *([', '.join(versions)] if versions else []), *others])}."


def conditions(source: Source) -> str:
    """Return device, versions and date."""
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    return f"{source.device}; {versions or 'versions not recorded'}; {source.date}"


def shown(value: Value) -> str:
    """Return a value as a cell."""
    if isinstance(value, Interval):
        low, high = map(shown, value.interval)
        return f"{shown(value.value)} [{low}, {high}]"
    if isinstance(value, str):
        return value
    return f"{value:.1e}" if 0 < value < Decimal("0.001") else f"{value:,}"


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines; a command is broken at its spaces alone, and before no mark of a list."""
    kept = re.sub(r" (?=([*+-]|\d+[.)]) )", "\0", text)
    lines = textwrap.fill(kept, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def pages() -> Iterator[Path]:
    """Yield the pages with tables and figures."""
    return (path for path in sorted(HERE.glob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8")))


def filled(page: str, tables: Mapping[str, Result], figure: Callable[[str], str]) -> str:
    """Return a page with its generated parts as they should be."""

    def made(found: re.Match[str]) -> str:
        kind, name = found.groups()
        text = table(name, tables[name]) if kind == "table" else figure(name)
        return f"<!-- {kind} {name} -->\n{text}\n<!-- end -->\n"

    return BLOCK.sub(made, page)
