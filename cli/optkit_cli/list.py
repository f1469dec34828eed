"""`optkit list`: what recipes can say."""

from __future__ import annotations

import json

import click

from optkit.errors import OptkitError
from optkit_cli.options import Command, takes


def _stages() -> dict[str, str]:
    from optkit.recipe.registry import PRESETS

    short = {name: f"short for `{json.dumps(preset)[1:-1].replace(chr(34), '')}`" for name, preset in PRESETS.items()}
    return _classes("stage") | short


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


def _recipes() -> dict[str, str]:
    from optkit.recipe.files import shipped_recipes
    from optkit.recipe.recipe import read_recipe

    return {name: str(read_recipe(path)[0].data["description"]) for name, path in shipped_recipes().items()}


def _datasets() -> dict[str, str]:
    from optkit.source.texts import known_texts

    return known_texts()


def _models() -> dict[str, str]:
    from optkit.source.models import known_models

    return known_models()


def _evals() -> dict[str, str]:
    return _classes("eval")


LISTS = {"stages": _stages, "evals": _evals, "recipes": _recipes, "datasets": _datasets, "models": _models}


@click.command(cls=Command, short_help="List what recipes can name.")
@click.argument("what", metavar="|".join(LISTS), type=click.Choice(list(LISTS)))
@takes("json")
def command(what: str) -> None:
    """List the stages, evals, recipes, data sets or models known by name, plug-ins included."""
    from optkit_cli.output import print_result
    from optkit_cli.tables import definition_list

    known = LISTS[what]()
    print_result(known, lambda: [definition_list(list(known.items()))])
