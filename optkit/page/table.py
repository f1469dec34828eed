"""A table that a page sorts and filters: texts to read, and the numbers behind them."""

from __future__ import annotations

from dataclasses import dataclass


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
