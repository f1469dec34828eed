"""`optkit card`: the model card of an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, invocation, takes


@click.command(cls=Command, short_help="Write an artifact's model card.")
@takes("artifact")
@click.option("--repo", metavar="OWNER/NAME", default="", help="Its name on the hub, for the examples in the card.")
@click.option("--print", "printed", is_flag=True, help="Print the card and write nothing.")
@takes("json")
def command(artifact: Path, repo: str, printed: bool) -> None:
    """Write ARTIFACT's model card, README.md with the hub's metadata, beside its weights.

    `optkit push` uploads that file; edit it before. Without one it uploads the card that this
    command would write.
    """
    from optkit.artifact import read_finished
    from optkit.common.own_files import CARD
    from optkit.publishing.card import card_of
    from optkit.publishing.targets.hub import Hub
    from optkit.verification.result_file import read_scorecard
    from optkit_cli.output import print_json

    found = read_finished(artifact)
    text = card_of(found, read_scorecard(artifact), Hub(repo).repository if repo else "")
    if not printed:
        found.attach(CARD, text)
    if invocation().as_json:
        print_json({"card": text, "file": None if printed else str(artifact / CARD)})
    else:
        click.echo(text if printed else artifact / CARD, nl=not printed)
