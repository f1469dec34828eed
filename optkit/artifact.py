"""An artifact: a directory that deploys as it is.
`optkit.json` (how it was made) and the scorecard lie beside the weights.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, model_validator

from optkit.common.atomic import drafted
from optkit.common.field_types import Form
from optkit.common.files import check_name_inside, read_object, reading
from optkit.common.frozen import Frozen, digest
from optkit.common.own_files import (
    ATTACHMENTS,
    CARD,
    OWN_FILES,
    RECORD,
    is_own,
    is_unedited,
    name_in_artifact,
)
from optkit.errors import ArtifactError, StoreError
from optkit.model.companions import published_files
from optkit.model.formats.base import Format
from optkit.recipe.recipe import DirectoryName, Recipe, load_recipe
from optkit.recipe.registry import stage_class
from optkit.scorecard.published import located_stage
from optkit.scorecard.scorecard import StepLine
from optkit.source.models import ModelSource
from optkit.stage import Setting
from optkit.store.files import describe_file, is_unchanged, list_files
from optkit.store.out_directory import place, settle_beside
from optkit.store.records import Machine
from optkit.store.store import Store, explain_os_error

SCHEMA = 1
ASKED = "Name a directory that `optkit run` wrote, such as artifacts/llama_int4"
AGAIN = "Delete the directory and run its recipe again"
FACTS = {"size_bytes": int, "mtime_ns": int, "sha256": str}
"""What is known of each file."""


Key = Annotated[str, Form("^[0-9a-z]{1,64}$", "a key: digits and small letters, 64 at most")]


class _Step(BaseModel):
    """What is relied on of a step."""

    kind: str
    key: str
    seconds: float
    environment: Machine | None = None
    sha256: dict[str, str] | None = None


class ArtifactRecord(Frozen):
    """What `optkit.json` says.
    That is enough to open the artifact as it was measured, and to make it again.
    """

    optkit_artifact: int = SCHEMA
    """Version of this schema."""
    name: DirectoryName
    key: Key
    """Digest of the weights and the settings."""
    weights_key: Key
    """Digest of the model and the stages that made the weights."""
    baseline_key: Key
    """Digest of the unmodified model."""
    created: str
    """UTC, ISO 8601."""
    optkit: str
    """Version that made it."""
    recipe: dict[str, Any]
    """The recipe as resolved and pinned."""
    settings: tuple[dict[str, Any], ...]
    """Stages to apply again at each opening: one-key mappings, as in a recipe."""
    steps: tuple[dict[str, Any], ...]
    """Each transform with its key, seconds, report, machine, and the digests of what it left."""
    imported: dict[str, Any] | None = None
    """The same of the model that the recipe starts from; None of one that is used where it lies."""
    calibrated_on: tuple[dict[str, str], ...] = ()
    """Texts that shaped the weights; evals refuse them."""
    finished: bool = True
    """The scorecard is there."""
    attachments: tuple[str, ...] = ()
    """Files beside the scorecard, by their places below the artifact; a later run replaces them."""
    files: dict[str, dict[str, Any]]
    """Size, time and SHA-256 of every file of the model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ModelSource.model_validate(dict(self.recipe.get("model") or {}))
        for step in (*self.steps, *([self.imported] if self.imported else [])):
            _Step.model_validate(step)
        for text in self.calibrated_on:
            if missing := {"dataset", "split", "revision"} - set(text):
                raise ValueError(f"calibrated_on: a text has no {min(missing)}")
        for name in self.attachments:
            check_name_inside(name)
            if not name.startswith(f"{ATTACHMENTS}/"):
                raise ValueError(f"attachments: {name} is no file below {ATTACHMENTS}")
        for name, facts in self.files.items():
            check_name_inside(name)
            wrong = [key for key, kind in FACTS.items() if type(facts.get(key)) is not kind]
            if wrong:
                raise ValueError(f"files: {name} has no {wrong[0]}")
        return self


class Artifact(Frozen):
    """A published artifact: where it is and what it says of itself."""

    directory: Path
    record: ArtifactRecord

    def check(self) -> None:
        """Raise ArtifactError if a file of the model was lost or changed since it was published."""
        changed = [name for name, known in self.record.files.items() if not is_unchanged(self.directory / name, known)]
        if changed:
            what = f"{len(changed)} of {len(self.record.files)} files are missing or were changed"
            some = ", ".join(changed[:3])
            raise ArtifactError(f"{what}: {some}", where=str(self.directory), remedy="Run its recipe again")

    def require_finished(self) -> None:
        """Raise ArtifactError if the run that published it ended before its scorecard was there."""
        if not self.record.finished:
            why = "The weights are there, and what was to be measured of them is not"
            remedy = "Run its recipe again: it goes on from what is finished"
            raise ArtifactError("its run did not finish", where=str(self.directory), why=why, remedy=remedy)

    def finish(self) -> None:
        """Say in its record that the scorecard is there."""
        self._recorded(finished=True)

    def replace_attachments(self, files: Mapping[str, bytes]) -> Artifact:
        """Return the artifact with these files below its folder of attachments.
        They take the place of those that an earlier run left there.
        """
        wanted = {f"{ATTACHMENTS}/{place}": content for place, content in files.items()}
        # What a kill leaves of either is known as ours: the record is written before the files are.
        self._recorded(attachments=tuple(sorted({*self.record.attachments, *wanted})))
        for name in set(self.record.attachments) - set(wanted):
            path = self._place(name)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                for folder in path.parents[: len(Path(name).parts) - 1]:
                    folder.rmdir()
        for name, content in wanted.items():
            self.attach(name, content)
        return self._recorded(attachments=tuple(sorted(wanted)))

    def _recorded(self, **changes: Any) -> Artifact:
        """Return the artifact with a changed record, on disk too."""
        record = self.record.model_copy(update=changes)
        if record != self.record:
            self.attach(RECORD, record.model_dump_json(indent=1))
        return self.model_copy(update={"record": record})

    def attach(self, name: str, content: str | bytes) -> None:
        """Write one of optkit's own files (a scorecard, an attachment) beside the weights."""
        with self.attaching(name) as draft:
            draft.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)

    @contextlib.contextmanager
    def attaching(self, name: str) -> Iterator[Path]:
        """Give a file to write, which becomes one of optkit's own if the block ends well."""
        try:
            with drafted(self._place(name)) as draft:
                yield draft
        except OSError as error:
            raise explain_os_error(error, name, self.directory, "copy the artifact to another place") from error

    def _place(self, name: str) -> Path:
        path = self.directory / name
        if not path.parent.resolve().is_relative_to(self.directory.resolve()):
            what, why = (
                f"{Path(name).parent} leads out of the directory",
                "optkit writes beside the weights and nowhere else",
            )
            raise ArtifactError(what, where=str(self.directory), why=why, remedy="Delete that link")
        return path


def measured_weights(artifact: Artifact, store: Store) -> str:
    """Return the key under which an artifact's weights are measured.
    It is its own if this store holds the same files, else their digest.

    A record alone proves nothing: another version, machine or author leaves other weights under the
    same key.
    """

    def contents(files: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        return {name_in_artifact(name): facts["sha256"] for name, facts in files.items() if not is_own(name)}

    key, files = artifact.record.weights_key, contents(artifact.record.files)
    with contextlib.suppress(StoreError):
        if contents(store.record(key)["files"]) == files:
            return key
    return digest(files)


def settings_of(artifact: Artifact) -> list[Setting]:
    """Return the settings that an artifact was measured with."""
    found = []
    for entry in artifact.record.settings:
        for kind, fields in entry.items():
            with reading(artifact.directory / RECORD, f"the setting {kind} cannot be read", AGAIN, ArtifactError):
                setting = stage_class(kind).model_validate(fields)
            if not isinstance(setting, Setting):
                raise ArtifactError(f"{kind} is not a setting", where=str(artifact.directory))
            found.append(located_stage(setting, artifact.directory.parent))
    return found


def steps_of(artifact: Artifact) -> list[StepLine]:
    """Return the transforms that made an artifact."""
    with reading(artifact.directory / RECORD, "the steps cannot be read", AGAIN, ArtifactError):
        known = StepLine.model_fields
        return [
            StepLine.model_validate({name: value for name, value in step.items() if name in known})
            for step in artifact.record.steps
        ]


def recorded_recipe(artifact: Artifact) -> Recipe:
    """Return the recipe that made an artifact. Raises ArtifactError if its steps are not those that
    are recorded.
    """
    recipe = load_recipe(artifact.record.recipe)
    recorded, wanted = [step["kind"] for step in artifact.record.steps], [entry.kind for entry in recipe.transforms]
    if recorded != wanted:
        what = f"its steps are {', '.join(recorded) or 'none'}, and its recipe has {', '.join(wanted) or 'none'}"
        why = "One of them was changed since it was made"
        raise ArtifactError(what, where=str(artifact.directory / RECORD), why=why, remedy="Run its recipe again")
    return recipe


def is_artifact(directory: Path) -> bool:
    """Say whether optkit published this directory."""
    return (directory / RECORD).is_file()


def read_artifact(directory: Path) -> Artifact:
    """Return a published artifact. Raises ArtifactError if the directory is none, or its record
    cannot be read.
    """
    path = directory / RECORD
    if not directory.is_dir():
        raise ArtifactError("no such directory", where=str(directory), remedy=ASKED)
    if not path.is_file():
        why, remedy = "It was not made by `optkit run`", "To measure any other model: optkit eval"
        raise ArtifactError(f"there is no {RECORD}", where=str(directory), why=why, remedy=remedy)
    data = read_object(path, ArtifactError, AGAIN)
    schema = data.get("optkit_artifact")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ArtifactError(f"schema {schema} is newer than this optkit", where=str(path), remedy="Upgrade optkit")
    with reading(path, "cannot be read", AGAIN, ArtifactError):
        return Artifact(directory=directory, record=ArtifactRecord.model_validate(data))


def read_finished(directory: Path) -> Artifact:
    """Return a published artifact as `read_artifact` does.
    Raises ArtifactError if its run did not finish, too.
    """
    found = read_artifact(directory)
    found.require_finished()
    return found


def standing(out: Path, key: str) -> Artifact | None:
    """Return the artifact of this key that stands at `out`, whole.
    None if it has to be written, in place of another or of none.

    Raises StoreError if files that optkit did not write would be lost by that, ArtifactError
    if nobody can tell.
    """
    if not is_artifact(out):
        return None
    found = read_artifact(out)
    if found.record.key == key:
        with contextlib.suppress(ArtifactError):
            found.check()
            return found
    ours = {*OWN_FILES, *found.record.files, *found.record.attachments}
    if (out / CARD).is_file() and is_unedited((out / CARD).read_bytes()):
        ours.add(CARD)
    own = map(Path, (CARD, *OWN_FILES, *found.record.attachments))
    drafts = tuple(path.with_name(f".{path.name}.").as_posix() for path in own)
    foreign = [name for name in list_files(out) if name not in ours and not name.startswith(drafts)]
    if foreign:
        what = "the artifact there would be replaced, and with it files that optkit did not write"
        remedy = "Move them away, or name another directory with --out"
        raise StoreError(f"{what}: {', '.join(foreign[:3])}", where=str(out), remedy=remedy)
    return None


def publish(
    weights: Path, out: Path, record: Mapping[str, Any], stored: Mapping[str, dict[str, Any]] | None = None
) -> Artifact:
    """Make `out` the artifact with these weights, by a rename; call it inside `reserve(out)`.

    `stored`: the files of the store's record when a stage left the weights there; they become hard
    links if the disk allows it, which costs no space. The files of a user's own directory and of
    the hub's cache are copied, so that nobody changes both by changing one. So are those of a
    format that must not be linked. An artifact of the same key that is still whole stays as it is.
    `record` holds the fields of `ArtifactRecord` but `files`.
    """
    if known := standing(out, record["key"]):
        return known
    draft = out.with_name(f".{out.name}.draft-{secrets.token_hex(4)}")
    link = stored is not None and Format.of(weights).may_link
    try:
        files = {}
        trusted = bool(record["recipe"].get("model", {}).get("trust_remote_code"))
        names = list_files(weights) if stored is not None else published_files(weights, trusted)
        # The card of an artifact that this one is made of takes the place of that one's source.
        for called, name in {name_in_artifact(name): name for name in sorted(names, reverse=True)}.items():
            if not is_own(name):
                linked = place(weights / name, draft / called, link=link)
                files[called] = stored[name] if linked and stored else describe_file(draft / called)
        made = ArtifactRecord.model_validate({**record, "files": files, "finished": False})
        (draft / RECORD).write_text(made.model_dump_json(indent=1), encoding="utf-8")
        if out.exists():
            out.rename(out.with_name(f".{out.name}.old-{secrets.token_hex(4)}"))
        draft.rename(out)
    except OSError as error:
        raise explain_os_error(error, "the artifact", out.parent) from error
    finally:
        settle_beside(out)
    return Artifact(directory=out, record=made)
