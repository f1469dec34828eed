"""`optkit compare`: which of several artifacts to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optkit_cli.options import Command, invocation, takes


@click.command(cls=Command, short_help="Put artifacts side by side, and say which to take.")
@takes("artifacts", "comparison")
@click.option("--csv", "form", flag_value="csv", help="Print every number as CSV.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the tables in Markdown.")
@takes("json")
def command(places: tuple[Path, ...], form: str | None, **asked: Any) -> int:
    """Rank artifacts beside the unmodified model, and say which one to take.
    Name artifacts, scorecard.json files, or directories with any of them below.

    \b
    optkit compare artifacts/sweep_int4 --require "perplexity<=1.05x" --best size_bytes

    With --require or --best the exit status is 3 if no artifact passes, 4 if one may. An artifact
    passes if it keeps its own gates and each --require.
    """
    from optkit.common.garbage import uncollected
    from optkit.common.visible import visible_lines
    from optkit.comparison import compare, to_csv, to_markdown
    from optkit_cli.compare_view import comparison_view
    from optkit_cli.output import print_result

    if invocation().as_json and form:
        raise click.UsageError(f"--json and --{form} exclude each other. Name one of them.")
    with uncollected():  # all that is read stays until the end
        comparison = compare(places, **asked)
        if form:
            click.echo(visible_lines(to_csv(comparison) if form == "csv" else to_markdown(comparison)), nl=False)
        else:
            print_result(comparison, lambda: comparison_view(comparison))
    return comparison.exit_status
