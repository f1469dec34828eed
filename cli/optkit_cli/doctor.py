"""`optkit doctor`: what can run here, and what to install for the rest."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, json_option, store_option


@click.command(cls=Command, short_help="Say what can run here, and what is missing.")
@store_option
@json_option
def command(store: Path | None, as_json: bool) -> None:
    """Print versions, devices, memory, disk, and which stages, evals and engines can run here."""
    from optkit.doctor import diagnose
    from optkit_cli.doctor_view import diagnosis_view
    from optkit_cli.output import print_json, show

    diagnosis = diagnose(store)
    if as_json:
        print_json(diagnosis.model_dump(mode="json"))
    else:
        show(*diagnosis_view(diagnosis))
