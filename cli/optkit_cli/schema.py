"""`optkit schema`: the JSON Schema of recipes."""

from __future__ import annotations

import click

from optkit_cli.options import Command


@click.command(cls=Command, short_help="Print the JSON Schema of recipes.")
def command() -> None:
    """Print the JSON Schema of recipes, so that an editor completes and checks them."""
    from optkit.recipe.schema import recipe_schema
    from optkit_cli.output import print_json

    print_json(recipe_schema())
