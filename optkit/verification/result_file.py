"""verification.json: what each engine made of an artifact.
It is kept beside the artifact and valid for its key and its files alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from optkit.artifact import Artifact, read_finished
from optkit.common.files import read_object, reading
from optkit.common.frozen import Frozen, digest
from optkit.common.own_files import SCORECARD_JSON, VERIFICATION_JSON
from optkit.errors import ArtifactError
from optkit.scorecard import Loading, Scorecard, read_json
from optkit.verification.registry import engine_names


class Verification(Frozen):
    """What verification.json holds."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    artifact_key: str
    files: str = ""
    """Digest of the SHA-256 of every file; empty if an optkit wrote it that did not look at
    them.
    """
    loading: tuple[Loading, ...]


def read_loading(artifact: Artifact) -> tuple[Loading, ...]:
    """Return what engines made of this artifact.
    Nothing if it was not verified, or another artifact was.

    Raises ArtifactError if verification.json is damaged.
    """
    path = artifact.directory / VERIFICATION_JSON
    if not path.is_file():
        return ()
    remedy = "Delete it and run `optkit verify` again"
    with reading(path, "cannot be read", remedy, ArtifactError):
        found = Verification.model_validate(read_object(path, ArtifactError, remedy))
    is_of_it = (found.artifact_key, found.files) == (artifact.record.key, _digest_of_files(artifact))
    return found.loading if is_of_it else ()


def read_scorecard(artifact: Path) -> Scorecard:
    """Return the scorecard of an artifact, with what engines made of it. Raises ArtifactError if
    there is none.
    """
    found = read_finished(artifact)
    if not (artifact / SCORECARD_JSON).is_file():
        raise ArtifactError(
            "there is no scorecard", where=str(artifact), why="It was deleted", remedy="Run its recipe again"
        )
    return read_json(artifact / SCORECARD_JSON).model_copy(update={"loading": read_loading(found)})


def told_so_far(artifact: Artifact) -> Scorecard | None:
    """Return the scorecard with what engines made of the artifact, None if it was deleted.
    Raises ArtifactError if either file is damaged.
    """
    if (artifact.directory / SCORECARD_JSON).is_file():
        return read_scorecard(artifact.directory)
    read_loading(artifact)
    return None


def keep_loading(artifact: Artifact, loading: Sequence[Loading]) -> tuple[Loading, ...]:
    """Store results beside those of other engines and versions, and return all of the artifact's.

    A result takes the place of one of the same versions; that an engine could not be asked is kept
    only while nothing is known of it.
    """
    found = {_identity(each): each for each in (*read_loading(artifact), *loading)}
    known = {each.engine for each in found.values() if each.verdict != "skipped"}
    order = {name: place for place, name in enumerate(engine_names())}
    ordered = sorted(found, key=lambda key: (order.get(found[key].engine, len(order)), key))
    kept = [found[key] for key in ordered if found[key].verdict != "skipped" or found[key].engine not in known]
    record = Verification(artifact_key=artifact.record.key, files=_digest_of_files(artifact), loading=tuple(kept))
    artifact.attach(VERIFICATION_JSON, record.model_dump_json(indent=1, by_alias=True) + "\n")
    return record.loading


def _digest_of_files(artifact: Artifact) -> str:
    """Digest what the files hold, not when they were written.
    A run that publishes the same files again keeps what is known of them.
    """
    return digest({name: facts["sha256"] for name, facts in artifact.record.files.items()})


def _identity(loading: Loading) -> tuple[str, ...]:
    if loading.verdict == "skipped":
        return (loading.engine,)
    return loading.engine, loading.device, *(f"{name}=={version}" for name, version in sorted(loading.packages.items()))
