"""An artifact: a directory that deploys as it is, with `optkit.json` (how it was made) and the
scorecard beside the weights.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from optkit.common.atomic import write_text_atomically
from optkit.common.files import check_name_inside, read_object, reading
from optkit.common.frozen import Frozen, digest
from optkit.common.held_files import hold, release
from optkit.common.own_files import OWN_FILES, RECORD, SCORECARD_JSON, is_own
from optkit.errors import ArtifactError, StoreError
from optkit.model.companions import published_files
from optkit.model.formats.base import Format
from optkit.store.store import Store, describe_file, explain_os_error, is_unchanged, list_files

SCHEMA = 1
AGAIN = "Delete the directory and run its recipe again"
FACTS = {"size_bytes": int, "mtime_ns": int, "sha256": str}
"""What is known of each file."""


class ArtifactRecord(Frozen):
    """What `optkit.json` says: enough to open the artifact as it was measured, and to make it
    again.
    """

    optkit_artifact: int = SCHEMA
    """Version of this schema."""
    name: str
    key: str
    """Digest of the weights and the settings."""
    weights_key: str
    """Digest of the model and the stages that made the weights."""
    baseline_key: str
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
    """Each transform with its key, seconds and report."""
    calibrated_on: tuple[dict[str, str], ...] = ()
    """Texts that shaped the weights; evals refuse them."""
    finished: bool | None = None
    """The scorecard is there; None of an artifact that is older than this field, which is finished
    if it has one.
    """
    files: dict[str, dict[str, Any]]
    """Size, time and SHA-256 of every file of the model."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
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
            raise ArtifactError(
                f"{len(changed)} of {len(self.record.files)} files are missing or were changed: "
                f"{', '.join(changed[:3])}",
                where=str(self.directory),
                remedy="Run its recipe again",
            )

    def require_finished(self) -> None:
        """Raise ArtifactError where the run that published it ended before its scorecard was there."""
        finished = self.record.finished
        if not ((self.directory / SCORECARD_JSON).is_file() if finished is None else finished):
            raise ArtifactError(
                "its run did not finish",
                where=str(self.directory),
                why="The weights are there, and what was to be measured of them is not",
                remedy="Run its recipe again: it goes on from what is finished",
            )

    def finish(self) -> None:
        """Say in its record that the scorecard is there."""
        if not self.record.finished:
            self.attach(RECORD, self.record.model_copy(update={"finished": True}).model_dump_json(indent=1))

    def attach(self, name: str, text: str) -> None:
        """Write one of optkit's own files (a scorecard, a verification) beside the weights."""
        try:
            write_text_atomically(self.directory / name, text)
        except OSError as error:
            raise explain_os_error(error, name, self.directory) from error


def measured_weights(artifact: Artifact, store: Store) -> str:
    """Return the key under which an artifact's weights are measured: its own where this store holds
    the same files, else their digest.

    A record alone proves nothing: another version, machine or author leaves other weights under the
    same key.
    """

    def contents(files: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        return {name: facts["sha256"] for name, facts in files.items() if not is_own(name)}

    key, files = artifact.record.weights_key, contents(artifact.record.files)
    with contextlib.suppress(StoreError):
        if contents(store.record(key)["files"]) == files:
            return key
    return digest(files)


def is_artifact(directory: Path) -> bool:
    """Say whether optkit published this directory."""
    return (directory / RECORD).is_file()


def read_artifact(directory: Path) -> Artifact:
    """Return a published artifact. Raises ArtifactError where the directory is none, or its record
    cannot be read.
    """
    path = directory / RECORD
    if not directory.is_dir():
        raise ArtifactError("no such directory", where=str(directory))
    if not path.is_file():
        raise ArtifactError(f"there is no {RECORD}", where=str(directory), why="It was not made by `optkit run`")
    data = read_object(path, ArtifactError, AGAIN)
    schema = data.get("optkit_artifact")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ArtifactError(f"schema {schema} is newer than this optkit", where=str(path), remedy="Upgrade optkit")
    with reading(path, "cannot be read", AGAIN, ArtifactError):
        return Artifact(directory=directory, record=ArtifactRecord.model_validate(data))


def read_finished(directory: Path) -> Artifact:
    """Return a published artifact as `read_artifact` does; raises ArtifactError where its run did
    not finish, too.
    """
    found = read_artifact(directory)
    found.require_finished()
    return found


def settle(out: Path) -> Path:
    """Return the directory that a path to write to means: what a link leads to, and `.` and `..` by
    their names.
    """
    return out.resolve() if out.is_symlink() or out.name in ("", "..") else out


@contextlib.contextmanager
def reserve(out: Path, store: Path) -> Iterator[None]:
    """Hold an output directory for this process, so that two runs never write one artifact; mends
    what a killed one left there.

    Raises StoreError where another run holds it, where it holds files that are not ours, where one
    of it and the store lies inside the other, where the process stands in it, or where it cannot be
    written.
    """
    _check_place(out, store)
    lock = out.with_name(f".{out.name}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        held = hold(lock)
    except BlockingIOError as error:
        raise StoreError(
            "another optkit run is writing there",
            where=str(out),
            remedy="Wait for it, or name another directory with --out",
        ) from error
    except OSError as error:
        raise explain_os_error(error, "the artifact", out.parent) from error
    try:
        _settle_beside(out)
        yield
    finally:
        release(held, lock)


def _check_place(out: Path, store: Path) -> None:
    if out.exists() and not out.is_dir():
        raise StoreError("is a file", where=str(out), remedy="Name a directory with --out")
    place, shelf = out.resolve(), store.resolve()
    if place.is_relative_to(shelf) or shelf.is_relative_to(place):
        how = (
            "is the store itself"
            if place == shelf
            else "lies in the store"
            if place.is_relative_to(shelf)
            else "holds the store"
        )
        raise StoreError(
            f"{how} ({shelf})",
            where=str(out),
            why="An artifact is replaced as a whole, and finished steps would go with it",
            remedy="Name another directory with --out, or another store with --store",
        )
    if out.is_dir() and any(out.iterdir()) and not is_artifact(out):
        raise StoreError(
            "the directory holds files that optkit did not write",
            where=str(out),
            why="They would be replaced",
            remedy="Empty it, or name another directory with --out",
        )
    if Path.cwd().is_relative_to(place):
        raise StoreError(
            "is the directory that you are in",
            where=str(out),
            why="It would be replaced",
            remedy="Name another with --out",
        )


def _settle_beside(out: Path) -> None:
    """Put the artifact back that a run moved aside and never replaced, and delete what else
    unfinished runs left beside `out`.
    """
    for each in list(out.parent.iterdir()):
        if each.name.startswith(f".{out.name}.old-") and not out.exists():
            with contextlib.suppress(OSError):
                each.rename(out)
        elif each.name.startswith((f".{out.name}.old-", f".{out.name}.draft-")):
            shutil.rmtree(each, ignore_errors=True)


def standing(out: Path, key: str) -> Artifact | None:
    """Return the artifact of this key that stands at `out`, whole; None where it has to be written,
    in place of another or of none.

    Raises StoreError where files that optkit did not write would be lost by that, ArtifactError
    where nobody can tell.
    """
    if not is_artifact(out):
        return None
    found = read_artifact(out)
    if found.record.key == key:
        with contextlib.suppress(ArtifactError):
            found.check()
            return found
    ours = {*OWN_FILES, *found.record.files}
    drafts = tuple(f".{name}." for name in OWN_FILES)
    foreign = [name for name in list_files(out) if name not in ours and not name.startswith(drafts)]
    if foreign:
        raise StoreError(
            "the artifact there would be replaced, and with it files that optkit did not write: "
            f"{', '.join(foreign[:3])}",
            where=str(out),
            remedy="Move them away, or name another directory with --out",
        )
    return None


def publish(
    weights: Path, out: Path, record: Mapping[str, Any], stored: Mapping[str, dict[str, Any]] | None = None
) -> Artifact:
    """Make `out` the artifact with these weights, by a rename; call it inside `reserve(out)`.

    `stored`: the files of the store's record when a stage left the weights there; they become hard
    links where the disk allows it, which costs no space. The files of a user's own directory and of
    the hub's cache are copied, so that nobody changes both by changing one, and so are those of a
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
        for name in list_files(weights) if stored is not None else published_files(weights, trusted):
            if not is_own(name):
                linked = place(weights / name, draft / name, link=link)
                files[name] = stored[name] if linked and stored else describe_file(draft / name)
        made = ArtifactRecord.model_validate({**record, "files": files, "finished": False})
        (draft / RECORD).write_text(made.model_dump_json(indent=1), encoding="utf-8")
        if out.exists():
            out.rename(out.with_name(f".{out.name}.old-{secrets.token_hex(4)}"))
        draft.rename(out)
    except OSError as error:
        raise explain_os_error(error, "the artifact", out.parent) from error
    finally:
        _settle_beside(out)
    return Artifact(directory=out, record=made)


def place(source: Path, target: Path, *, link: bool) -> bool:
    """Make `target` the same file as `source`: a hard link where asked for and possible, else a
    copy; returns whether it is a link.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        with contextlib.suppress(OSError):
            target.hardlink_to(source)
            return True
    shutil.copyfile(source, target)
    return False
