"""`optkit plan`: what a run would do, what of it is done already, and what the rest will need."""

from __future__ import annotations

from typing import Any

import click

from optkit_cli.options import Command, takes


@click.command(cls=Command, short_help="Say what a run would do and need.")
@takes("recipe", "model", "set", "trials", "place", "json", "trust")
def command(
    recipe: str,
    model: str | None,
    overrides: tuple[str, ...],
    trials: int | None,
    trust_remote_code: bool,
    **place: Any,
) -> None:
    """Print RECIPE's steps, with the disk, memory and time that they will need; compute nothing.
    A step is a hit if the store has it, else a miss. Of a recipe with a matrix it says what its
    combinations share, with --trials what so many drawn ones do.
    """
    from optkit import pipeline
    from optkit.recipe.matrix_reading import load_matrix
    from optkit_cli.output import print_result
    from optkit_cli.plan_view import plan_view, sweep_plan_view
    from optkit_cli.progress import open_progress

    matrix = load_matrix(recipe, overrides, model)
    if trials:
        matrix.require_varied(recipe, "Leave out --trials")
    found = matrix.some(trials, seed=0) if trials else matrix.combinations()
    combinations = [each.trusting(trust_remote_code) for each in found]
    if matrix.varied:
        from optkit.sweep.plan import plan_sweep

        sweep = plan_sweep(matrix.name, combinations, progress=open_progress(), **place)
        print_result(sweep, lambda: sweep_plan_view(sweep))
    else:
        plan = pipeline.plan(combinations[0].recipe, progress=open_progress(), **place)
        print_result(plan, lambda: plan_view(plan))
