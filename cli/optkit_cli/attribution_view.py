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
    return plain_table(first, *(f">{name}" for name in others), rows=found.rows)
