"""`optkit run`: make the artifact of a recipe, and measure it beside the unmodified model.
The scorecard is printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optkit.errors import UnsoundError
from optkit_cli.options import DIRECTORY, Command, takes
from optkit_cli.pipeline_files import PipelineFiles, pipeline_options


@click.command(cls=Command, short_help="Make an artifact, measure it, print its scorecard.")
@takes("recipe", "model", "set")
@click.option("--out", metavar="DIR", type=DIRECTORY, help="Directory of the artifact [artifacts/RECIPE].")
@takes("retime", "against")
@click.option(
    "--verify",
    "verified",
    is_flag=True,
    help="Open the artifact in every installed engine at the end, as `optkit verify` does.",
)
@pipeline_options
@takes("place", "json", "verbose", "quiet", "trust")
def command(
    recipe: str,
    model: str | None,
    overrides: tuple[str, ...],
    out: Path | None,
    verified: bool,
    against: Path | None,
    junit: Path | None,
    metrics: Path | None,
    verbose: bool,
    trust_remote_code: bool,
    **asked: Any,
) -> int:
    """Make the artifact of RECIPE, measure it and print the scorecard.
    RECIPE is a file, or a name from `optkit list recipes`.

    What was finished before is not done again. Exit status: 0 all gates pass, 3 a gate failed, 4 a
    gate is inconclusive.
    """
    from optkit import pipeline
    from optkit.recipe.gate_places import gate_places, require_earlier_release
    from optkit.recipe.recipe import load_recipe
    from optkit_cli.output import print_scorecard
    from optkit_cli.progress import working

    files = PipelineFiles(junit, metrics)
    files.prepare()
    try:
        with working() as progress:
            wanted = load_recipe(recipe, overrides=overrides, model=model).trusting(trust_remote_code)
            require_earlier_release(wanted.gates, against, gate_places(recipe, overrides))
            target = out or Path("artifacts") / wanted.name
            scorecard = pipeline.run(wanted, out=target, verified=verified, against=against, progress=progress, **asked)
    except UnsoundError:
        print_scorecard(pipeline.read_scorecard(target), target, verbose=verbose)
        raise
    print_scorecard(scorecard, target, verbose=verbose)
    files.write(scorecard, lambda: gate_places(recipe, overrides))
    if verified and any(each.failed for each in scorecard.loading):
        return 3
    return scorecard.exit_status
