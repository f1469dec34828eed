"""`optkit push`: upload an artifact with its card and scorecard."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, invocation, takes


@click.command(cls=Command, short_help="Upload an artifact to a registry.")
@takes("artifact")
@click.argument("address", metavar="TARGET")
@click.option("--dry-run", is_flag=True, help="Print what would go where and stop; uses no network.")
@click.option("--allow-failed-gates", is_flag=True, help="Push it even if a gate of its recipe failed.")
@takes("json", "quiet")
def command(artifact: Path, address: str, dry_run: bool, allow_failed_gates: bool) -> None:
    """Check ARTIFACT, print what goes where, and upload it to TARGET.

    \b
    hf://OWNER/NAME[@REVISION]            the Hugging Face hub ($HF_TOKEN, $HF_ENDPOINT)
    mlflow://EXPERIMENT[/REGISTERED_NAME] MLflow ($MLFLOW_TRACKING_URI)
    oci://REGISTRY/NAME:TAG               a registry of containers ($OPTKIT_OCI_USERNAME, ..._PASSWORD)

    Exit status: 3 if a file was lost or changed, or a gate failed and --allow-failed-gates is not
    given.
    """
    from optkit.publishing.push import prepare_push
    from optkit_cli.output import only_the_result_on_stdout, print_result, show
    from optkit_cli.progress import open_progress
    from optkit_cli.push_view import files_view, push_document, result_view

    progress = open_progress()
    push = prepare_push(artifact, address, allow_failed_gates=allow_failed_gates)
    for line in push.warnings:
        progress.warn(line)
    if not invocation().as_json:
        show(*files_view(push))
    if dry_run:
        known = None
    else:
        with only_the_result_on_stdout():
            known = push.upload(progress)
    print_result(push_document(push, known), lambda: result_view(push, known))
