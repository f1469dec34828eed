"""`optkit plan`: what a run would do, what of it is done already, and what the rest will need."""

from __future__ import annotations

from pathlib import Path

import click

from optkit_cli.options import (
    Command,
    all_of,
    data_option,
    device_option,
    json_option,
    model_option,
    recipe_argument,
    set_option,
    store_option,
    trust_option,
)


@click.command(cls=Command, short_help="Say what a run would do and need.")
@recipe_argument
@all_of(model_option, set_option, device_option, data_option, store_option, json_option, trust_option)
def command(
    recipe: str,
    model: str | None,
    overrides: tuple[str, ...],
    device: str | None,
    data: Path | None,
    store: Path | None,
    as_json: bool,
    trust_remote_code: bool,
) -> None:
    """Print RECIPE's steps, hit or miss, with the disk and memory they will need; compute nothing."""
    from optkit import pipeline
    from optkit.recipe.recipe import load_recipe
    from optkit_cli.output import print_json, show
    from optkit_cli.plan_view import plan_view

    wanted = load_recipe(recipe, overrides=overrides, model=model).trusting(trust_remote_code)
    plan = pipeline.plan(wanted, device=device, store=store, data=data)
    if as_json:
        print_json(plan.model_dump(mode="json"))
    else:
        show(*plan_view(plan))
