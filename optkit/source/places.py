"""Where models and texts of this machine were seen, by what they hold.
What is published says names and digests, and no places.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from optkit.common.atomic import remember
from optkit.common.cache import default_store
from optkit.common.files import object_if_any
from optkit.errors import SourceError
from optkit.progress import Progress
from optkit.source.digests import PREFIX
from optkit.source.models import BUILT_IN, ModelSource, pin_model
from optkit.source.texts import TextSource, is_file_name

FILE = "places.json"
BESIDE = "Put it beside the artifact"
Found = TypeVar("Found")


def pin_and_remember(source: ModelSource, cache: Path | None = None, progress: Progress | None = None) -> ModelSource:
    """Return what `pin_model` returns, and remember where a directory or file lies. Raises what
    `pin_model` raises.
    """
    pinned = pin_model(source, cache, progress)
    if is_place(pinned):
        _remember(pinned.revision, pinned.name, cache)
    return pinned


def remember_text(pinned: TextSource) -> None:
    """Remember where the file of a pinned text lies."""
    if is_file_name(pinned.dataset):
        _remember(pinned.revision, str(Path(pinned.dataset).expanduser().absolute()), None)


def is_place(source: ModelSource) -> bool:
    """Say whether a pinned model is a directory or file of this machine alone."""
    return source.name not in BUILT_IN and (source.revision or "").startswith(PREFIX)


def find_recorded(
    source: ModelSource, near: Path, given: str | None = None, cache: Path | None = None, remedy: str = BESIDE
) -> ModelSource:
    """Return a model that an artifact records, with its place.
    It is `given`, was last seen there, or lies `near` the artifact.

    Raises SourceError if none of them holds what its revision says.
    """

    def at(place: str) -> ModelSource:
        return pin_model(source.model_copy(update={"name": place}), cache)

    if given is not None:
        return at(given)
    return _first(at, "model", source.name, source.revision, near, cache, remedy) if is_place(source) else source


def find_recorded_text(text: TextSource, near: Path) -> TextSource:
    """Return a text that an artifact records, with its place, as `find_recorded` does."""

    def at(place: str) -> TextSource:
        return text.model_copy(update={"dataset": place}).pinned(None)

    return _first(at, "text", text.dataset, text.revision, near, None, BESIDE) if is_file_name(text.dataset) else text


def _first(
    at: Callable[[str], Found],
    what: str,
    recorded: str,
    revision: str | None,
    near: Path,
    cache: Path | None,
    remedy: str,
) -> Found:
    name = Path(recorded).name
    places = [Path(place) for place in (_known(cache).get(str(revision)), recorded) if place]
    looked = list(dict.fromkeys(place.absolute() for place in (*places, near / name, near.parent / name)))
    for place in looked:
        if place.exists():
            with contextlib.suppress(SourceError):
                return at(str(place))
    raise SourceError(
        f"the {what} {name} that the artifact was made from is not found",
        where=str(near),
        why=f"Its record says {revision} and no place; it is not {' or '.join(map(str, looked))}",
        remedy=remedy,
    )


def _remember(revision: str | None, place: str, cache: Path | None) -> None:
    known = _known(cache)
    if known.get(str(revision)) != place:
        remember(_file(cache), json.dumps({**known, str(revision): place}, indent=1))


def _file(cache: Path | None) -> Path:
    return (cache or default_store()) / FILE


def _known(cache: Path | None) -> dict[str, str]:
    return {key: place for key, place in object_if_any(_file(cache)).items() if isinstance(place, str)}
