"""`optkit compare`: several artifacts side by side."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, json_option


@click.command(cls=Command, short_help="Put artifacts side by side.")
@click.argument("artifacts", metavar="ARTIFACT...", type=click.Path(path_type=Path), nargs=-1, required=True)
@json_option
def command(artifacts: tuple[Path, ...], as_json: bool) -> None:
    """Print the scorecards of several artifacts side by side, each protocol in its own rows."""
    from optkit import pipeline
    from optkit_cli.compare_view import comparison_view
    from optkit_cli.output import print_json, show

    if as_json:
        cards = {
            str(artifact): pipeline.read_scorecard(artifact).model_dump(mode="json", by_alias=True)
            for artifact in artifacts
        }
        print_json([{"artifact": artifact, **card} for artifact, card in cards.items()])
    else:
        show(*comparison_view(pipeline.compare(artifacts)))
