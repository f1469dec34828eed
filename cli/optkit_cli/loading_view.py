"""The loading table on the terminal.
It says which engines open an artifact, and how near they come to what optkit measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from optkit.scorecard import Loading, loading_cells, loading_columns, loading_notes
from optkit_cli.tables import indented, plain_table

STYLES = {"agrees": "green", "disagrees": "bold red", "refused": "bold red", "skipped": "dim"}


def loading_view(loading: Sequence[Loading]) -> list[RenderableType]:
    """Return the table and what to say below it; nothing if the artifact was not verified."""
    if not loading:
        return []
    columns = loading_columns(loading)
    first, second, *numbers = columns
    table = plain_table(first, second, *(f">{name}" for name in numbers))
    for each in loading:
        engine, loads, *cells = loading_cells(each, columns)
        table.add_row(engine, Text(loads, style=STYLES[each.verdict]), *cells)
    notes = indented([("loading", note) for note in loading_notes(loading)])
    return [table] if notes is None else [table, notes]
