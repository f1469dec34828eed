"""`optkit reproduce`: make an artifact again from its own record, and compare the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optkit_cli.options import DIRECTORY, Command, takes


@click.command(cls=Command, short_help="Make an artifact again from its record, and compare.")
@takes("artifact")
@click.option("--model", metavar="MODEL", help="Model that the artifact was made from, if it is not found.")
@click.option("--out", metavar="DIR", type=DIRECTORY, help="Keep the second artifact here.")
@takes("device", "data", "json", "quiet", "trust")
def command(artifact: Path, **asked: Any) -> int:
    """Make ARTIFACT again from its own record, in a store of its own, and compare every file.

    What differs here is said: versions, device, CPU. Exit status: 0 every SHA-256 is the same, 3 a
    file differs.
    """
    from optkit.reports.reproduction import reproduce
    from optkit_cli.output import print_result
    from optkit_cli.progress import working
    from optkit_cli.reproduce_view import reproduce_view

    with working() as progress:
        found = reproduce(artifact, progress=progress, **asked)
    print_result(found, lambda: reproduce_view(found))
    return found.exit_status
