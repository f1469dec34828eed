"""`optkit doctor`: what can run here, and what to install for the rest."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import Command, takes


@click.command(cls=Command, short_help="Say what can run here, and what is missing.")
@click.option(
    "--model", metavar="MODEL", help="Also list matrices of shapes that tensor cores or packed kernels do not take."
)
@click.option(
    "--links", is_flag=True, help="Also measure how fast the GPUs of this host exchange data (NCCL all-reduce)."
)
@takes("store", "json")
def command(model: str | None, links: bool, store: Path | None) -> None:
    """Print versions, devices, memory, disk, and which stages, evals, engines and kernels run."""
    from optkit.reports.doctor.doctor import diagnose
    from optkit.reports.doctor.gpu_links import gpu_links
    from optkit.reports.doctor.shapes import shape_problems
    from optkit.reports.roofline.models import shape_of_model
    from optkit_cli.doctor_view import diagnosis_view
    from optkit_cli.output import print_result

    diagnosis = diagnose(store)
    if model is not None:
        diagnosis = diagnosis.model_copy(update={"model": model, "shapes": shape_problems(shape_of_model(model))})
    if links:
        diagnosis = diagnosis.model_copy(update={"links": gpu_links()})
    print_result(diagnosis, lambda: diagnosis_view(diagnosis))
