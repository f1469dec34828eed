"""Results go to stdout, as one JSON document or as text; everything else goes to stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from optkit.common.visible import CONTROLS, visible_lines
from optkit_cli.options import invocation

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel
    from rich.console import Console, RenderableType

    from optkit.scorecard import Scorecard

WIDTH = 100
"""Columns of a table that is not printed on a terminal."""
UNBOUNDED = 1000
"""Columns that no table needs, to measure how wide it is by itself."""


def print_json(value: Any) -> None:
    """Leave one JSON document to be printed when the command is over, alone on stdout."""
    _leave(document_of(value))


def print_result(
    result: BaseModel | Mapping[str, Any] | Sequence[Any], view: Callable[[], Iterable[RenderableType]]
) -> None:
    """Print a result, as JSON or as the tables and lines of its view."""
    if not invocation().as_json:
        show(*view())
    else:
        print_json(result if isinstance(result, Mapping | Sequence) else result.model_dump(mode="json"))


def document_of(value: Any) -> str:
    """Return JSON as it is printed."""
    return f"{json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)}\n"


def _leave(document: str) -> None:
    invocation().document = document


def print_document(document: str) -> OSError | None:
    """Print a document on stdout, and return why it did not arrive."""
    try:
        document.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        document = f"{json.dumps(json.loads(document), indent=2)}\n"
    document = "\n".join(CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in document.split("\n"))
    try:
        click.echo(document, nl=False)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at its end
        return error
    return None


def print_scorecard(scorecard: Scorecard, directory: Path | None, *, verbose: bool) -> None:
    """Print a scorecard: as scorecard.json holds it, what decides, or all of it (`verbose`).
    The artifact lies in `directory`.
    """
    from optkit.scorecard import to_json
    from optkit_cli.scorecard_view import short_scorecard, whole_scorecard

    if invocation().as_json:
        _leave(to_json(scorecard))
    else:
        show(*(whole_scorecard if verbose else short_scorecard)(scorecard, directory))


def show(*parts: RenderableType) -> None:
    """Print tables and lines as wide as the terminal.
    Elsewhere they are `WIDTH` columns of plain text without spaces at the ends of lines.
    """
    if sys.stdout is not None and sys.stdout.isatty():
        _print(_console(highlight=False), parts)
    else:
        click.echo(plain_text(*parts), nl=False)


def _print(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print parts without breaking or cutting a word: a path of which a piece is missing cannot be copied."""
    from rich.measure import Measurement
    from rich.text import Text

    wide, unbounded = console.width, console.options.update(width=UNBOUNDED)
    for part in parts:
        console.width = max(wide, Measurement.get(console, unbounded, part).minimum if isinstance(part, Text) else 0)
        console.print(part, crop=False)


def _console(**settings: Any) -> Console:
    """Return a console that shows the control characters of texts; it sends colours alone."""
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Visible(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible_lines(segment.text), segment.style)

    return Visible(**settings)


def plain_text(*parts: RenderableType, width: int = WIDTH) -> str:
    """Return tables and lines as text without colours."""
    buffer = io.StringIO()
    console = _console(file=buffer, highlight=False, width=width, force_terminal=False, color_system=None)
    _print(console, parts)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


@contextlib.contextmanager
def only_the_result_on_stdout() -> Iterator[int | None]:
    """Send whatever libraries print while they work to stderr.
    That is of Python, of C, and of the processes that they start.

    Gives the descriptor of stdout itself, if there is one.
    """
    try:
        kept = os.dup(1)
    except OSError:  # there is no stdout
        yield None
        return
    try:
        _flush()
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield kept
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """Write out what Python and C keep back for stdout."""
    import ctypes

    if sys.stdout is not None:
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
