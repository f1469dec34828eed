"""`optkit sign`: a signature of an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import FILE, Command, takes


@click.command(cls=Command, short_help="Sign an artifact with a key.")
@takes("artifact")
@click.option("--key", metavar="PEM", type=FILE, required=True, help="Private key of an elliptic curve.")
@click.option("--certificate", metavar="PEM", type=FILE, help="Certificate of the key, and those that it stands on.")
def command(artifact: Path, key: Path, certificate: Path | None) -> None:
    """Write model.sig into ARTIFACT: the SHA-256 of each file, signed (OpenSSF model signing, extra `sign`).

    `optkit verify --signature` checks it, and so does `model_signing verify`. The environment's
    OPTKIT_KEY_PASSWORD opens an encrypted key.
    """
    from optkit.artifact import read_finished
    from optkit.publishing.signing import sign
    from optkit_cli.output import only_the_result_on_stdout

    with only_the_result_on_stdout():
        made = sign(read_finished(artifact), key, certificate)
    click.echo(made)
