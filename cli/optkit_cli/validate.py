"""`optkit validate`: every problem of one or more recipes at once."""

from __future__ import annotations

import click

from optkit.errors import OptkitError, Problem, RecipeError
from optkit_cli import completion
from optkit_cli.options import Command, invocation, takes


@click.command(cls=Command, short_help="Check recipes; every problem at once.")
@click.argument("recipes", metavar="RECIPE...", nargs=-1, required=True, shell_complete=completion.recipes)
@takes("json")
def command(recipes: tuple[str, ...]) -> None:
    """Check each RECIPE and print every problem as file:line:column; exit status 2 if there is one."""
    from optkit.common.visible import visible
    from optkit.recipe.matrix import MOST
    from optkit.recipe.matrix_reading import load_matrix
    from optkit_cli.output import print_json

    problems: list[Problem] = []
    for recipe in recipes:
        try:
            matrix = load_matrix(recipe)
            checked = len(matrix.covering())
            count = f", {matrix.size if matrix.size > MOST else checked:,} combinations"
            if matrix.size > MOST:
                count += f" (each value in one of {checked} that were checked; a sweep of them needs --trials)"
            if not invocation().as_json:
                click.echo(visible(f"{recipe}: ok{count if matrix.varied else ''}"))
        except RecipeError as error:
            problems.extend(error.problems)
        except OptkitError as error:
            problems.append(Problem(str(error)))
    if problems:
        raise RecipeError(problems)
    if invocation().as_json:
        print_json({"status": "ok", "recipes": recipes})
