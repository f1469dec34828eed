"""`optkit schema`: the JSON Schemas of what people write and machines read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from optkit_cli.options import Command


def _recipe() -> dict[str, Any]:
    from optkit.recipe.schema import recipe_schema

    return recipe_schema()


def _scorecard() -> dict[str, Any]:
    from optkit.scorecard.scorecard import SCHEMA, Scorecard

    return _of(Scorecard, "scorecard", SCHEMA)


def _comparison() -> dict[str, Any]:
    from optkit.comparison.result import SCHEMA, Comparison

    return _of(Comparison, "comparison", SCHEMA)


def _of(model: Any, name: str, version: int) -> dict[str, Any]:
    from pydantic.json_schema import GenerateJsonSchema

    head = {"$schema": GenerateJsonSchema.schema_dialect, "$id": f"urn:optkit:{name}:{version}"}
    return {**head, **model.model_json_schema(mode="serialization"), "title": f"optkit {name}"}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "recipe": _recipe,
    "scorecard": _scorecard,
    "comparison": _comparison,
}


@click.command(cls=Command, short_help="Print the JSON Schema of recipes, scorecards or comparisons.")
@click.argument("what", metavar=f"[{'|'.join(SCHEMAS)}]", type=click.Choice(list(SCHEMAS)), default="recipe")
def command(what: str) -> None:
    """Print the JSON Schema of recipes, so that an editor completes and checks them, or of another
    document: what its fields are is said there. Its `$id` ends with the version of its meaning.
    """
    from optkit_cli.output import print_json

    print_json(SCHEMAS[what]())
