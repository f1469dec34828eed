"""`optkit compare`: several artifacts side by side."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, json_option


@click.command(cls=Command, short_help="Put artifacts side by side.")
@click.argument("artifacts", metavar="ARTIFACT...", type=click.Path(path_type=Path), nargs=-1, required=True)
@json_option
def command(artifacts: tuple[Path, ...], as_json: bool) -> None:
    """Print the scorecards of several artifacts side by side, the measurements of one protocol in one row."""
