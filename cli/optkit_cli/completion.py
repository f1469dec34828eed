"""What the shell offers while a command is typed: recipes, artifacts, names to explain."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def recipes(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the shipped recipes that begin so; files, if there are none."""
    from optkit.recipe.files import shipped_recipes

    return _beginning(shipped_recipes(), typed) or _items([typed], "file")


def artifacts(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the artifacts in a directory that begin so, and those below artifacts/ before one is
    named; directories, if there are none.
    """
    from optkit.common.own_files import RECORD

    folder, start = (Path(typed), "") if typed.endswith("/") else (Path(typed).parent, Path(typed).name)
    places = [folder, Path("artifacts")] if not typed else [folder]
    found = [str(each.parent) for place in places for each in sorted(place.glob(f"{glob.escape(start)}*/{RECORD}"))]
    return _items(found) or _items([typed], "dir")


def names(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the names with a page in `optkit explain` that begin so."""
    from optkit_cli.explain import known_names

    return _beginning(known_names(), typed)


def _beginning(known: Iterable[str], typed: str) -> list[CompletionItem]:
    return _items(each for each in sorted(set(known)) if each.startswith(typed))


def _items(words: Iterable[str], kind: str = "plain") -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(each, type=kind) for each in words]
