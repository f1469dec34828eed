"""`optkit show`: the scorecard of one artifact."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, artifact_argument, json_option


@click.command(cls=Command, short_help="Print an artifact's scorecard.")
@artifact_argument
@json_option
def command(artifact: Path, as_json: bool) -> None:
    """Print how ARTIFACT was made and its scorecard."""
