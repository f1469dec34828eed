"""Results go to stdout, as one JSON document or as text; everything else goes to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 100
"""Columns of a table that is not printed on a terminal."""


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def open_console() -> Console:
    """Return a console on stdout: as wide as the terminal, else `WIDTH` columns without colours."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def show(*parts: RenderableType) -> None:
    """Print tables and lines."""
    console = open_console()
    for part in parts:
        console.print(part, markup=False)


@contextlib.contextmanager
def only_the_result_on_stdout() -> Iterator[None]:
    """Send whatever libraries print while they work to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
