"""The plan of a recipe, as `optkit plan` makes it."""

from pathlib import Path
from typing import Any

from optkit.plan import Plan, make_plan
from optkit.recipe.recipe import load_recipe
from optkit.store.store import Store


def plan_of(recipe: Any, store: Path) -> Plan:
    """Return the plan of a recipe (a mapping, YAML or its path) on a CPU, with the store in a directory."""
    return make_plan(load_recipe(recipe).pinned(None), Store(store), "cpu")
