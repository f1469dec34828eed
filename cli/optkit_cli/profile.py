"""`optkit profile`: where the time of a model goes, and what to try."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from optkit_cli.options import DIRECTORY, Command, number_option, takes

QUIET_KINETO = "99"
"""Above all levels of the log of torch's profiler, which it writes for every trace."""


@click.command(cls=Command, short_help="Say where the time of a model goes.")
@takes("model_or_artifact")
@number_option("--batch", 1, "Sequences at once.")
@number_option("--prompt", 128, "Tokens of a prompt.")
@number_option("--new-tokens", 16, "Tokens generated after it.", least=2)
@click.option(
    "--out", metavar="DIR", type=DIRECTORY, default="profile", show_default=True, help="Directory for traces."
)
@click.option(
    "--nvtx",
    is_flag=True,
    help="Trace nothing; mark ranges for Nsight: nsys profile -c cudaProfilerApi optkit profile MODEL --nvtx",
)
@takes("device", "store", "json", "quiet", "trust")
def command(model: str, out: Path, **asked: Any) -> None:
    """Trace one request to a model or an artifact, prefill and decode apart.
    The artifact's settings are applied.

    Writes prefill.trace.json and decode.trace.json for ui.perfetto.dev, on a GPU also memory.pickle
    for docs.pytorch.org/memory_viz. Prints time by kind of operation, the kernels that take
    longest, and one sentence on what to try.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET_KINETO)
    from optkit.reports.profiling import profile_model
    from optkit_cli.output import print_result
    from optkit_cli.profile_view import profile_view
    from optkit_cli.progress import working

    with working() as progress:
        report = profile_model(model, out, progress=progress, **asked)
    print_result(report, lambda: profile_view(report, out))
