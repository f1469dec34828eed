"""Where models of this machine were seen, by what they hold.
What is published says names and digests, and no places.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from optkit.common.atomic import remember
from optkit.common.cache import default_store
from optkit.common.files import object_if_any
from optkit.errors import SourceError
from optkit.source.digests import PREFIX
from optkit.source.models import BUILT_IN, ModelSource, pin_model

FILE = "places.json"
BESIDE = "Put it beside the artifact"


def pin_and_remember(source: ModelSource, cache: Path | None = None) -> ModelSource:
    """Return what `pin_model` returns, and remember where a directory or file lies. Raises what
    `pin_model` raises.
    """
    pinned = pin_model(source, cache)
    if is_place(pinned):
        known = _known(cache)
        if known.get(str(pinned.revision)) != pinned.name:
            remember(_file(cache), json.dumps({**known, str(pinned.revision): pinned.name}, indent=1))
    return pinned


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
    if given is not None:
        return pin_model(source.model_copy(update={"name": given}), cache)
    if not is_place(source):
        return source
    name = Path(source.name).name
    places = [Path(place) for place in (_known(cache).get(str(source.revision)), source.name) if place]
    looked = list(dict.fromkeys(place.absolute() for place in (*places, near / name, near.parent / name)))
    for place in looked:
        if place.exists():
            with contextlib.suppress(SourceError):
                return pin_model(source.model_copy(update={"name": str(place)}), cache)
    raise SourceError(
        f"the model {name} that the artifact was made from is not found",
        where=str(near),
        why=f"Its record says {source.revision} and no place; it is not {' or '.join(map(str, looked))}",
        remedy=remedy,
    )


def _file(cache: Path | None) -> Path:
    return (cache or default_store()) / FILE


def _known(cache: Path | None) -> dict[str, str]:
    return {key: place for key, place in object_if_any(_file(cache)).items() if isinstance(place, str)}
