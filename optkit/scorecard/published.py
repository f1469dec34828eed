"""What an artifact says to others: names and digests of models and texts.
It says nothing of their places on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from optkit.common.attachment import Attachment
from optkit.common.frozen import Frozen, replaced
from optkit.common.own_files import without_home
from optkit.recipe.recipe import Recipe, SettingEntry
from optkit.scorecard import Scorecard
from optkit.source.models import ModelSource
from optkit.source.places import find_recorded, find_recorded_text, is_place
from optkit.source.texts import TextSource, is_file_name

NAME_IT = "Name its directory or file: --model PATH"
Located = TypeVar("Located", bound=Frozen)


def without_places(value: Any, recipe: Recipe) -> Any:
    """Return a JSON value with the names alone of a pinned recipe's models and texts."""
    names = {place: _name(place) for place in _places(recipe) if "/" in place}
    return _renamed(value, dict(sorted(names.items(), key=lambda item: -len(item[0]))))


def published_scorecard(scorecard: Scorecard, recipe: Recipe) -> Scorecard:
    """Return a scorecard as `without_places` has it."""
    return Scorecard.model_validate(without_places(scorecard.model_dump(mode="json"), recipe))


def published_attachments(files: Mapping[str, Attachment], recipe: Recipe) -> dict[str, Attachment]:
    """Return files, each with its place; their texts are as `without_places` has them."""
    return {place: _published(file, recipe) if file.is_text else file for place, file in files.items()}


def _published(file: Attachment, recipe: Recipe) -> Attachment:
    # A byte that is no UTF-8 stays what it is: the file may hold anything.
    text = without_places(file.content.decode("utf-8", "surrogateescape"), recipe)
    return replace(file, content=text.encode("utf-8", "surrogateescape"))


def located(recipe: Recipe, near: Path, model: str | None, *, remake: bool = False) -> Recipe:
    """Return the recipe of an artifact with the places of its model and its settings' models.
    The model's is `model` if the user named it. With `remake` it has those of models and texts that
    its transforms read, too.

    Raises SourceError if one is not found.
    """
    stages = tuple(
        located_stage(entry, near) if remake or isinstance(entry, SettingEntry) else entry for entry in recipe.stages
    )
    return recipe.model_copy(
        update={"model": find_recorded(recipe.model, near, model, remedy=NAME_IT), "stages": stages}
    )


def located_stage(stage: Located, near: Path) -> Located:
    """Return a stage, or an entry of a recipe, with the places of the models and texts that it reads."""

    def find(part: Frozen) -> Frozen:
        if isinstance(part, ModelSource):
            return find_recorded(part, near)
        return find_recorded_text(part, near) if isinstance(part, TextSource) else part

    found: Located = replaced(stage, find)
    return found


def _places(value: Any) -> Iterator[str]:
    """Yield the paths of models and texts in a recipe or a part of it."""
    if isinstance(value, ModelSource) and is_place(value):
        yield value.name
    if isinstance(value, TextSource) and is_file_name(value.dataset):
        yield value.dataset
    if place := getattr(value, "local_place", ""):
        yield place
    if isinstance(value, Frozen):
        for name in type(value).model_fields:
            yield from _places(getattr(value, name))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _places(each)


def _name(place: str) -> str:
    name = Path(place).name
    return name if name not in ("", "..") else Path(place).resolve().name


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for place, name in names.items():
            value = value.replace(place, name)
        return without_home(value)
    if isinstance(value, dict):
        return {_renamed(key, names): _renamed(part, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(part, names) for part in value]
    return value
