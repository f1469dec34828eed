"""What each stage added to damage or speed, on the terminal: a line after each stage."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from optkit.scorecard import Rung, waterfall
from optkit_cli.tables import plain_table


def attribution_view(rungs: Sequence[Rung]) -> RenderableType | None:
    """Return the table, None if there is nothing to tell apart."""
    found = waterfall(rungs)
    if found is None:
        return None
    first, *others = found.columns
    return plain_table(first, *(f">{name}" for name in others), rows=found.rows)
