"""`optkit bom`: the bill of materials of an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, takes


@click.command(cls=Command, short_help="Write an artifact's bill of materials.")
@takes("artifact")
def command(artifact: Path) -> None:
    """Write bom.cdx.json into ARTIFACT: a CycloneDX 1.7 ML-BOM (extra `bom`).

    It has the files with their SHA-256, the base model, data sets, numbers, steps and packages.
    Write it before you sign, and again after the numbers change.
    """
    from optkit.artifact import read_finished
    from optkit.common.own_files import BOM
    from optkit.publishing.bom import bill_of_materials
    from optkit.verification.result_file import read_scorecard

    found = read_finished(artifact)
    found.check()
    found.attach(BOM, bill_of_materials(found, read_scorecard(artifact)))
    click.echo(found.directory / BOM)
