"""`optkit list`: what recipes can say."""

from __future__ import annotations

import click

from optkit_cli.options import Command, json_option


def _stages() -> dict[str, str]:
    from optkit import registry

    return {name: registry.summary(registry.stage_class(name)) for name in registry.stage_names()}


def _evals() -> dict[str, str]:
    from optkit import registry

    return {name: registry.summary(registry.eval_class(name)) for name in registry.eval_names()}


def _recipes() -> dict[str, str]:
    from optkit.recipe import load_recipe
    from optkit.recipe_files import shipped_recipes

    return {name: load_recipe(path).description for name, path in shipped_recipes().items()}


def _datasets() -> dict[str, str]:
    from optkit.source.texts import known_texts

    return known_texts()


def _models() -> dict[str, str]:
    from optkit.source.models import known_models

    return known_models()


LISTS = {"stages": _stages, "evals": _evals, "recipes": _recipes, "datasets": _datasets, "models": _models}


@click.command(cls=Command, short_help="List what recipes can name.")
@click.argument("what", metavar="|".join(LISTS), type=click.Choice(list(LISTS)))
@json_option
def command(what: str, as_json: bool) -> None:
    """List the stages, evals, recipes, data sets or models that optkit knows by name, plug-ins included."""
    from optkit_cli.output import print_json, show
    from optkit_cli.tables import definition_list

    known = LISTS[what]()
    if as_json:
        print_json(known)
    else:
        show(definition_list(list(known.items())))
