"""`optkit show`: the scorecard of one artifact."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, invocation, takes


@click.command(cls=Command, short_help="Print an artifact's scorecard.")
@takes("artifact", "json", "verbose")
def command(artifact: Path, verbose: bool) -> None:
    """Print how ARTIFACT was made and its scorecard; fail if its files changed since."""
    from optkit.artifact import read_artifact
    from optkit.pipeline import read_scorecard
    from optkit_cli.output import print_scorecard

    found, scorecard = read_artifact(artifact), read_scorecard(artifact)
    as_json = invocation().as_json
    if as_json:
        found.check()
    print_scorecard(scorecard, artifact, verbose=verbose)
    if not as_json:
        found.check()
