"""What each stage added to the damage, on the terminal: a line after each stage."""

from __future__ import annotations

from rich.console import RenderableType

from optkit.scorecard import Scorecard, waterfall
from optkit_cli.tables import plain_table


def attribution_view(scorecard: Scorecard) -> RenderableType | None:
    """Return the table, None if one stage alone changed the numbers."""
    found = waterfall(scorecard.attribution)
    if found is None:
        return None
    first, *others = found.columns
    table = plain_table((first, "left"), *((name, "right") for name in others))
    for row in found.rows:
        table.add_row(*row)
    return table
