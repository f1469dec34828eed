"""`optkit schema`: the JSON Schemas of what people write and machines read."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from optkit_cli.options import Command

DOCUMENTS = {"recipe": "", "scorecard": "optkit.scorecard.scorecard", "comparison": "optkit.comparison.result"}
"""What is written -> the module that has its class and the version of its meaning, `SCHEMA`."""


def _schema(what: str) -> dict[str, Any]:
    if what == "recipe":
        from optkit.recipe.schema import recipe_schema

        return recipe_schema()
    from optkit.common.meanings import DescribedSchema

    module = import_module(DOCUMENTS[what])
    schema = getattr(module, what.capitalize()).model_json_schema(
        mode="serialization", schema_generator=DescribedSchema
    )
    head = {"$schema": DescribedSchema.schema_dialect, "$id": f"urn:optkit:{what}:{module.SCHEMA}"}
    return {**head, **schema, "title": f"optkit {what}"}


@click.command(cls=Command, short_help="Print the JSON Schema of recipes, scorecards or comparisons.")
@click.argument("what", metavar=f"[{'|'.join(DOCUMENTS)}]", type=click.Choice(list(DOCUMENTS)), default="recipe")
def command(what: str) -> None:
    """Print the JSON Schema of recipes, so that an editor completes and checks them.
    `scorecard` and `comparison` name what `scorecard.json` and `optkit compare --json` hold.

    The last part of `$id` is the version of the meaning of the fields.
    """
    from optkit_cli.output import print_json

    print_json(_schema(what))
