"""`optkit history`: what runs made here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optkit_cli.options import Command, takes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optkit.comparison.history import History, Made
    from optkit.scorecard.scorecard import Measured

MOST_METRICS = 3
SAID = {"there": "", "gone": "  (gone)", "replaced": "  (replaced)"}


@click.command(cls=Command, short_help="List what runs made here.")
@click.option("--model", metavar="NAME", help="List artifacts of this model; * stands for any text.")
@click.option("--recipe", metavar="NAME", help="List artifacts of this recipe; * stands for any text.")
@click.option(
    "--verdict",
    type=click.Choice(["PASS", "FAIL", "INCONCLUSIVE", "SKIPPED"], case_sensitive=False),
    help="List artifacts of this verdict.",
)
@click.option(
    "--where",
    metavar="LIMIT",
    multiple=True,
    help='List artifacts that keep this limit, e.g. "perplexity<=1.05x"; repeatable.',
)
@takes("store", "json")
def command(
    model: str | None, recipe: str | None, verdict: str | None, where: tuple[str, ...], store: Path | None
) -> None:
    """List the artifacts that runs with this store made, newest first.

    \b
    optkit history --verdict pass --where "perplexity<=1.05x"
    """
    from optkit.common.cache import default_store
    from optkit.comparison.history import history
    from optkit_cli.output import print_result

    root = store or default_store()
    found = history(root, model=model, recipe=recipe, verdict=verdict, where=where)
    print_result(found, lambda: _view(found, root))


def _view(found: History, root: Path) -> Iterator[RenderableType]:
    """Yield what to print, top to bottom."""
    from rich.text import Text

    from optkit.scorecard.summary import FIRST
    from optkit_cli.tables import plain_table, verdict_text

    if found.made:
        named = {row.metric.name for made in found.made for row in made.rows}
        metrics = [name for name in FIRST if name in named][:MOST_METRICS]
        table = plain_table("made (UTC)", "recipe", "model", *(f">{name}" for name in metrics), "", "artifact")
        for place in (0, -2, -1):
            table.columns[place].no_wrap = True
        for made in found.made:
            table.add_row(
                made.created[:16].replace("T", " "),
                made.name,
                made.model.partition("@")[0],
                *(_number(made.rows, name) for name in metrics),
                verdict_text(made.verdict) if any(row.gates for row in made.rows) else "no gates",
                Text.assemble(_shown(made), (SAID[made.state], "dim")),
            )
        yield table
    else:
        yield Text(f"nothing of this was made with the store {root}")
    if found.unreadable:
        yield Text(f"{found.unreadable} damaged records are left out", style="dim")


def _number(rows: Sequence[Measured], name: str) -> str:
    """Return the first number of a metric, as its ratio if it has one."""
    from optkit.scorecard.numbers import format_ratio, format_value

    row = next((row for row in rows if row.metric.name == name and not row.metric.failure), None)
    if row is None:
        return "-"
    return format_ratio(row.ratio) if row.ratio else format_value(row.metric.value, row.metric.unit)


def _shown(made: Made) -> str:
    here = Path.cwd()
    return str(made.directory.relative_to(here) if made.directory.is_relative_to(here) else made.directory)
