"""From the text of a recipe to a checked `Recipe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optkit.recipe.recipe import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe"]


def __getattr__(name: str) -> Any:
    """Import the recipe only when it is asked for: it needs pydantic."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from optkit.recipe import recipe

    return getattr(recipe, name)
