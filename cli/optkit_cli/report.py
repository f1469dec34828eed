"""`optkit report`: one page that says which of several artifacts to take, or what one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optkit_cli.options import FILE, Command, invocation, takes


@click.command(cls=Command, short_help="Write a page that says which artifact to take.")
@takes("artifacts")
@click.option(
    "--out", metavar="FILE", type=FILE, default=Path("report.html"), show_default=True, help="Where to write the page."
)
@takes("comparison", "json")
def command(places: tuple[Path, ...], out: Path, **asked: Any) -> int:
    """Write one HTML page that says which artifact to take; it works offline.
    Name artifacts, scorecard.json files, or directories with any of them below. Of one artifact it
    is the page that lies beside it.

    \b
    optkit report artifacts/sweep_int4 --require "perplexity<=1.05x" --best size_bytes

    Exit status: 3 if none meets what is required, 4 if one may.
    """
    from optkit.common.byte_sizes import size_text
    from optkit.page import report
    from optkit_cli.output import print_json
    from optkit_cli.written_files import refuse_other, write_named

    refuse_other(out, "--out", "page", b"<!doctype html")
    made = report(places, **asked)
    page = made.html.encode()
    write_named(out, page)
    size = len(page)
    if invocation().as_json:
        print_json({"report": str(out), "size_bytes": size, "scorecards": made.scorecards, "picks": list(made.picks)})
    else:
        several = f"{made.scorecards} scorecards, " + (
            f"take {', '.join(made.picks)}" if made.picks else "none is picked"
        )
        click.echo(f"{out}  {several if made.scorecards > 1 else '1 scorecard'}  {size_text(size)}")
    return made.exit_status
