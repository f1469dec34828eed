"""`optkit list`: what recipes can say."""

from __future__ import annotations

import json

import click

from optkit.errors import OptkitError
from optkit_cli.options import Command, takes

LISTS = ("stages", "evals", "recipes", "datasets", "models")


@click.command(cls=Command, short_help="List what recipes can name.")
@click.argument("what", metavar="|".join(LISTS), type=click.Choice(LISTS))
@takes("json")
def command(what: str) -> None:
    """List the stages, evals, recipes, data sets or models known by name, plug-ins included."""
    from optkit_cli.output import print_result
    from optkit_cli.tables import definition_list

    found = known(what)
    print_result(found, lambda: [definition_list(list(found.items()))])


def known(what: str) -> dict[str, str]:
    """Return name -> what it is."""
    from optkit.recipe.files import shipped_recipes
    from optkit.recipe.recipe import read_recipe
    from optkit.recipe.registry import PRESETS
    from optkit.source.models import known_models
    from optkit.source.texts import known_texts

    if what == "recipes":
        return {name: str(read_recipe(path)[0].data["description"]) for name, path in shipped_recipes().items()}
    if what in ("datasets", "models"):
        return known_texts() if what == "datasets" else known_models()
    presets = PRESETS if what == "stages" else {}
    short = {name: f"short for `{json.dumps(each)[1:-1].replace(chr(34), '')}`" for name, each in presets.items()}
    return _classes(what.removesuffix("s")) | short


def _classes(role: str) -> dict[str, str]:
    """Return the summary of each class, or why it cannot be loaded: a broken plug-in hides no others."""
    from optkit.recipe.registry import class_of, names_of, summary

    found = {}
    for name in names_of(role):
        try:
            found[name] = summary(class_of(role, name))
        except OptkitError as error:
            found[name] = f"error: {error}"
    return found
