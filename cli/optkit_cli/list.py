"""`optkit list`: what recipes can say."""

from __future__ import annotations

import click

from optkit_cli.options import Command, json_option


def _stages() -> dict[str, str]:
    from optkit import registry

    return {name: _first_sentence(registry.stage_class(name)) for name in registry.stage_names()}


def _evals() -> dict[str, str]:
    from optkit import registry

    return {name: _first_sentence(registry.eval_class(name)) for name in registry.eval_names()}


def _recipes() -> dict[str, str]:
    from optkit_cli.recipes import built_in_recipes, first_comment

    return {name: first_comment(path) for name, path in built_in_recipes().items()}


def _datasets() -> dict[str, str]:
    from optkit.source.texts import known_texts

    return known_texts()


def _models() -> dict[str, str]:
    from optkit.source.models import known_models

    return known_models()


LISTS = {"stages": _stages, "evals": _evals, "recipes": _recipes, "datasets": _datasets, "models": _models}


@click.command(cls=Command, short_help="List what recipes can name.")
@click.argument("what", type=click.Choice(list(LISTS)))
@json_option
def command(what: str, as_json: bool) -> None:
    """List the stages, evals, recipes, data sets or models that optkit knows by name, plug-ins included."""
    from optkit_cli.output import print_json, show
    from optkit_cli.tables import names_view

    known = LISTS[what]()
    if as_json:
        print_json(known)
    else:
        show(names_view(known))


def _first_sentence(described: type) -> str:
    text = " ".join((described.__doc__ or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")
