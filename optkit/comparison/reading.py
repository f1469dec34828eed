"""Find the scorecards below directories, and read each once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optkit.common.files import read_object
from optkit.common.own_files import ATTACHMENTS, RECORD, SCORECARD_JSON
from optkit.comparison.result import LeftOut
from optkit.errors import ArtifactError
from optkit.scorecard.scorecard import Scorecard, read_json

OWN = frozenset({RECORD, SCORECARD_JSON})
"""One of these makes a directory one scorecard's, not one to be searched."""


@dataclass
class Reading:
    """What was found."""

    cards: list[tuple[Path, Scorecard]] = field(default_factory=list)
    """Each with its place: the artifact's directory, or the file of a bare scorecard."""
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_scorecards(places: Sequence[Path]) -> Reading:
    """Return the scorecards of artifacts, of scorecard.json files and of what lies below directories.

    A file that is found twice is read once; of equal scorecards the first stays. What is below a
    directory and cannot be read is left out with its reason; what was named itself is an error.
    Raises ArtifactError for that, and if nothing is found.
    """
    found, seen = Reading(), set[Path]()
    alike: dict[tuple[str, str], list[tuple[Path, Scorecard]]] = {}
    for place in places:
        named = [place] if _is_one(place) else None
        for each in named or _below(place, found.left_out):
            if (real := each.resolve()) in seen:
                continue
            seen.add(real)
            try:
                card = _read(each)
            except ArtifactError as error:
                if named:
                    raise
                why = str(error).removeprefix(f"{error.where}: ")
                found.left_out.append(LeftOut(place=str(each), why=why))
                continue
            others = alike.setdefault((card.artifact_key, card.created), [])
            if first := next((other for other, its in others if its == card), None):
                found.notes.append(f"{each} holds the scorecard of {first}, and is left out")
                continue
            others.append((each, card))
            found.cards.append((each, card))
    if not found.cards:
        _refuse(places, found.left_out)
    return found


def _is_one(place: Path) -> bool:
    """Say whether a place is one scorecard, not a directory of many."""
    if not place.exists():
        remedy = "Name artifacts, scorecard.json files, or directories with any of them below"
        raise ArtifactError("no such file or directory", where=str(place), remedy=remedy)
    return not place.is_dir() or any((place / name).exists() for name in OWN)


def _below(directory: Path, left_out: list[LeftOut]) -> Iterator[Path]:
    """Yield what holds a scorecard below a directory, in the order of names.
    What cannot be searched is left out with its reason.
    """

    def fail(error: OSError) -> None:
        left_out.append(LeftOut(place=str(error.filename), why=f"cannot be searched: {error.strerror}"))

    for place, folders, names in os.walk(directory, onerror=fail):
        if not OWN.isdisjoint(names):
            folders.clear()
            yield Path(place)
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each != ATTACHMENTS)


def _read(place: Path) -> Scorecard:
    """Return the scorecard of an artifact, or of a file; raises ArtifactError."""
    if not place.is_dir():
        return read_json(place)
    if (place / RECORD).exists() and read_object(place / RECORD, ArtifactError).get("finished") is not True:
        from optkit.artifact import read_finished  # imports much, for what is rare

        read_finished(place)
    if not (place / SCORECARD_JSON).is_file():
        raise ArtifactError(
            "there is no scorecard", where=str(place), why="It was deleted", remedy="Run its recipe again"
        )
    return read_json(place / SCORECARD_JSON)


def _refuse(places: Sequence[Path], left_out: Sequence[LeftOut]) -> None:
    searched = ", ".join(map(str, places))
    if left_out:
        first = left_out[0]
        raise ArtifactError(
            f"none of the {len(left_out)} scorecards can be read",
            where=searched,
            why=f"{first.place}: {first.why}".rstrip("."),
            remedy="Run their recipes again",
        )
    raise ArtifactError(
        "no scorecard is here or below",
        where=searched,
        why=f"No directory has a {SCORECARD_JSON}",
        remedy="Name an artifact of `optkit run`, or a directory of several",
    )
