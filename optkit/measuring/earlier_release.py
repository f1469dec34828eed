"""The earlier release that a run is judged by (`--against`)."""

from __future__ import annotations

from pathlib import Path

from optkit.artifact import is_artifact, read_finished
from optkit.common.own_files import SCORECARD_JSON
from optkit.errors import UsageError
from optkit.recipe.gate_places import NONE
from optkit.scorecard import Scorecard, read_json


def earlier_release(against: Path | str | None) -> Scorecard | None:
    """Return the scorecard of an artifact, of a directory that holds one, or of a file.
    None for `none`, and if nothing is named.

    Raises UsageError if there is no scorecard, ArtifactError for one that cannot be read.
    """
    if against is None or str(against) == NONE:
        return None
    place = Path(against)
    if is_artifact(place):
        read_finished(place)
    path = place / SCORECARD_JSON if place.is_dir() else place
    if not path.is_file():
        raise UsageError(
            f"there is no scorecard at {path}",
            where="--against",
            remedy=f"Name the artifact of an earlier release or its {SCORECARD_JSON}, or write {NONE} before the first",
        )
    return read_json(path)
