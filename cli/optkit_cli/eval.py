"""`optkit eval`: measure a model or an artifact as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optkit_cli.options import Command, takes
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
    "--model", "unmodified", metavar="MODEL", help="Model that the artifact was made from, if it is not found."
)
@takes("retime", "against")
@pipeline_options
@takes("place", "json", "verbose", "quiet", "trust")
def command(model: str, evals: str, junit: Path | None, metrics: Path | None, verbose: bool, **asked: Any) -> int:
    """Measure a model (built-in, directory, .gguf file, hub id) or an artifact with FILE's evals.

    An artifact is measured beside its unmodified model. Exit status: as for `optkit run`, by the
    gates of FILE.
    """
    from optkit import pipeline
    from optkit.recipe.gate_places import gate_places
    from optkit_cli.output import print_scorecard
    from optkit_cli.progress import working

    files = PipelineFiles(junit, metrics)
    files.prepare()
    with working() as progress:
        scorecard = pipeline.evaluate(model, evals, progress=progress, **asked)
    print_scorecard(scorecard, None, verbose=verbose)
    files.write(scorecard, lambda: gate_places(evals))
    return scorecard.exit_status
