"""`optkit eval`: measure a model or an artifact as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from optkit_cli.options import Command, Place, takes
from optkit_cli.pipeline_files import PipelineFiles, pipeline_options


@click.command(cls=Command, short_help="Measure a model or an artifact.")
@takes("model_or_artifact")
@click.option(
    "--evals",
    metavar="FILE",
    required=True,
    help="A recipe, shipped (e.g. llama_int4) or yours, or any YAML file with a list `evals:`.",
)
@click.option(
    "--model",
    "unmodified",
    metavar="MODEL",
    help="Model that the artifact was made from, if it is not found.",
)
@takes("retime", "against")
@pipeline_options
@takes("place", "json", "verbose", "quiet", "trust")
def command(
    model: str,
    evals: str,
    unmodified: str | None,
    retime: bool,
    against: Path | None,
    junit: Path | None,
    metrics: Path | None,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    trust_remote_code: bool,
    **place: Unpack[Place],
) -> int:
    """Measure a model (built-in, directory, .gguf file, hub id) or an artifact with FILE's evals.

    An artifact is measured beside its unmodified model. Exit status: as for `optkit run`, by the
    gates of FILE.
    """
    from optkit import pipeline
    from optkit.recipe.gate_places import gate_places
    from optkit_cli.output import only_the_result_on_stdout, print_scorecard
    from optkit_cli.progress import open_progress

    files = PipelineFiles(junit, metrics)
    files.prepare()
    with only_the_result_on_stdout():
        scorecard = pipeline.evaluate(
            model,
            evals,
            retime=retime,
            unmodified=unmodified,
            against=against,
            trust_remote_code=trust_remote_code,
            progress=open_progress(quiet=quiet),
            **place,
        )
    print_scorecard(scorecard, None, as_json=as_json, verbose=verbose)
    files.write(scorecard, lambda: gate_places(evals))
    return scorecard.exit_status
