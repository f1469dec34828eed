"""`optkit reproduce`: make an artifact again from its own record, and compare the two."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import DIRECTORY, Command, takes


@click.command(cls=Command, short_help="Make an artifact again from its record, and compare.")
@takes("artifact")
@click.option("--model", metavar="MODEL", help="Model that the artifact was made from, if it is not found.")
@click.option("--out", metavar="DIR", type=DIRECTORY, help="Keep the second artifact here.")
@takes("device", "data", "json", "quiet", "trust")
def command(
    artifact: Path,
    model: str | None,
    out: Path | None,
    device: str | None,
    data: Path | None,
    as_json: bool,
    quiet: bool,
    trust_remote_code: bool,
) -> int:
    """Make ARTIFACT again from its own record, in a store of its own, and compare every file.

    What differs here is said: versions, device, CPU. Exit status: 0 every SHA-256 is the same, 3 a
    file differs.
    """
    from optkit.reports.reproduction import reproduce
    from optkit_cli.output import only_the_result_on_stdout, print_result
    from optkit_cli.progress import open_progress
    from optkit_cli.reproduce_view import reproduce_view

    with only_the_result_on_stdout():
        found = reproduce(
            artifact,
            out=out,
            model=model,
            device=device,
            data=data,
            trust_remote_code=trust_remote_code,
            progress=open_progress(quiet=quiet),
        )
    print_result(found, lambda: reproduce_view(found), as_json=as_json)
    return found.exit_status
