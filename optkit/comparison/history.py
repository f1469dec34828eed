"""What runs made here: one record in the store for each artifact that was published and measured.

ROOT/history/DIGEST.json    of the artifact's key and its directory; a later run replaces it
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

from optkit.artifact import Artifact
from optkit.common.atomic import remember
from optkit.common.frozen import Frozen, digest, replaced
from optkit.common.own_files import RECORD
from optkit.comparison.choice import judged, parse_requirement
from optkit.comparison.columns import model_of
from optkit.errors import UsageError, did_you_mean
from optkit.measure import Metric
from optkit.recipe.gates import Gate, Verdict
from optkit.scorecard.scorecard import Measured, Scorecard

FOLDER = "history"
SAMPLES = {"samples": (), "repeats": (), "trials": ()}
State: TypeAlias = Literal["there", "gone", "replaced"]


class Made(Frozen):
    """One artifact, as it was when its run was over."""

    name: str
    """Name of the recipe."""
    key: str
    """Digest of the weights and the settings."""
    directory: Path
    created: str
    """UTC, ISO 8601."""
    model: str
    """Name and revision of the unmodified model."""
    verdict: Verdict
    """The worst of its gates, which stand beside their numbers."""
    rows: tuple[Measured, ...]
    """Its numbers, without their samples."""
    state: State = "there"
    """Whether the directory still holds it: `gone` if it was deleted or moved, `replaced` if
    another artifact lies there.
    """


class History(Frozen):
    """What was made here, newest first."""

    made: tuple[Made, ...]
    unreadable: int = 0
    """Records that are damaged."""


def remember_artifact(artifact: Artifact, card: Scorecard, store: Path) -> None:
    """Leave the record of a finished artifact in a store; one that cannot be written forgets it."""
    made = Made(
        name=card.name,
        key=artifact.record.key,
        directory=artifact.directory.resolve(),
        created=artifact.record.created,
        model=model_of(card),
        verdict=card.verdict,
        rows=replaced(card.rows, lambda part: part.model_copy(update=SAMPLES) if isinstance(part, Metric) else part),
    )
    name = f"{digest([made.key, str(made.directory)])}.json"
    remember(store / FOLDER / name, made.model_dump_json(exclude_defaults=True))


def history(
    store: Path,
    *,
    model: str | None = None,
    recipe: str | None = None,
    verdict: str | None = None,
    where: Sequence[str] = (),
) -> History:
    """Return what runs with this store made, filtered.

    `model` and `recipe` are names with `*` for any text; `where` are limits as gates have them,
    `perplexity<=1.05x`, that the whole interval keeps. Raises UsageError for a wrong limit.
    """
    gates = [parse_requirement(text, "--where") for text in where]
    read = [_read(path) for path in sorted((store / FOLDER).glob("[!.]*.json"))]
    known = sorted((each for each in read if each), key=lambda each: (each.created, each.key), reverse=True)
    _check_names(gates, known)
    found = (
        each
        for each in known
        if _fits(model, each.model.partition("@")[0], each.model)
        and _fits(recipe, each.name)
        and verdict in (None, each.verdict)
        and all(judged(gate, each.rows).verdict == Verdict.PASS for gate in gates)
    )
    made = tuple(each.model_copy(update={"state": _state(each)}) for each in found)
    return History(made=made, unreadable=len(read) - len(known))


def _read(path: Path) -> Made | None:
    try:
        return Made.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _check_names(gates: Sequence[Gate], made: Sequence[Made]) -> None:
    names = sorted({row.metric.name for each in made for row in each.rows})
    for gate in gates:
        if names and gate.name not in names:
            raise UsageError(
                f"no artifact has '{gate.name}'", where="--where", remedy=did_you_mean(gate.name, names).strip()
            )


def _fits(wanted: str | None, *names: str) -> bool:
    return wanted is None or any(fnmatchcase(name.lower(), wanted.lower()) for name in names)


def _state(made: Made) -> State:
    try:
        key = json.loads((made.directory / RECORD).read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, LookupError, TypeError):
        return "gone"
    return "there" if key == made.key else "replaced"
