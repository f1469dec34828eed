"""Results go to stdout, as one JSON document or as text; everything else goes to stderr."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from optkit.scorecard import Scorecard

WIDTH = 100
"""Columns of a table that is not printed on a terminal."""


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_scorecard(scorecard: Scorecard, directory: Path | None, *, as_json: bool) -> None:
    """Print a scorecard, as scorecard.json holds it or as a table; `directory` is where the artifact lies."""
    from optkit.scorecard import to_json
    from optkit_cli.scorecard_view import scorecard_view

    if as_json:
        click.echo(to_json(scorecard), nl=False)
    else:
        show(*scorecard_view(scorecard, directory))


def show(*parts: RenderableType) -> None:
    """Print tables and lines: as wide as the terminal, else `WIDTH` columns of plain text without spaces at the ends of lines."""
    from rich.console import Console

    if sys.stdout is not None and sys.stdout.isatty():
        console = Console(highlight=False)
        for part in parts:
            console.print(part)
    else:
        click.echo(plain_text(*parts), nl=False)


def plain_text(*parts: RenderableType, width: int = WIDTH) -> str:
    """Return tables and lines as text without colours."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, highlight=False, width=width, force_terminal=False, color_system=None)
    for part in parts:
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


@contextlib.contextmanager
def only_the_result_on_stdout() -> Iterator[None]:
    """Send whatever libraries print while they work to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
