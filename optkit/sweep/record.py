"""What `sweep.json` says: how far each combination of a sweep is. It is all that a sweep goes on from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from optkit import __version__
from optkit.artifact import is_artifact
from optkit.common.atomic import write_text_atomically
from optkit.common.files import read_object, reading
from optkit.common.frozen import Frozen
from optkit.errors import StoreError
from optkit.store.out_directory import locked, real
from optkit.store.store import explain_os_error

RECORD = "sweep.json"
LOCK = ".sweep.lock"
SCHEMA = 1
Watcher = Callable[["SweepRecord", Collection[str]], None]
"""Hears how far each combination is, and which are at work, or `timings`."""
REMEDY = "Delete it: the artifacts beside it stay, and are found again"


class Status(StrEnum):
    """How far a combination is."""

    WAITING = "waiting"
    MADE = "made"
    """The artifact is there with everything but its timings."""
    DONE = "done"
    FAILED = "failed"


class Entry(Frozen):
    """One combination."""

    name: str
    """Of its directory below that of the sweep."""
    assignment: dict[str, Any]
    """Path -> value."""
    recipe: str
    """Digest of what it does."""
    status: Status = Status.WAITING
    reason: str = ""
    """Why it failed."""
    artifact_key: str | None = None
    timed_with: str | None = None
    """Digest of the models that it took turns with."""
    seconds: float | None = None
    """How long it took to make and to measure, without its timings."""
    verdict: str | None = None
    """Of its gates."""
    weights: bool = True
    """Its weights were not deleted by `--keep`."""


class SweepRecord(Frozen):
    """All combinations of a sweep, in their order."""

    optkit_sweep: int = SCHEMA
    """Version of this schema."""
    name: str
    created: str
    """UTC, ISO 8601."""
    optkit: str = __version__
    trials: int = 0
    """How many combinations a search will propose."""
    entries: tuple[Entry, ...] = ()

    @property
    def total(self) -> int:
        """How many combinations there will be."""
        return max(self.trials, len(self.entries))

    def entry(self, name: str) -> Entry:
        """Return the entry of a combination."""
        return next(each for each in self.entries if each.name == name)

    def having(self, *status: Status) -> tuple[Entry, ...]:
        """Return the entries that are so far."""
        return tuple(each for each in self.entries if each.status in status)

    def with_entry(self, changed: Entry) -> SweepRecord:
        entries = tuple(changed if each.name == changed.name else each for each in self.entries)
        return self.model_copy(update={"entries": entries})

    def write(self, directory: Path) -> None:
        """Leave the record in the sweep's directory, whole or not at all."""
        try:
            write_text_atomically(directory / RECORD, self.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise explain_os_error(error, RECORD, directory) from error


def unwatched(record: SweepRecord, now: Collection[str]) -> None:
    """Draw nothing."""


def new_record(name: str) -> SweepRecord:
    """Return the record of a sweep that begins."""
    return SweepRecord(name=name, created=datetime.now(UTC).isoformat(timespec="seconds"))


def read_record(directory: Path) -> SweepRecord | None:
    """Return what an earlier run left; None if there is nothing. Raises StoreError if it is damaged."""
    path = directory / RECORD
    if not path.is_file():
        return None
    said = read_object(path, StoreError, REMEDY)
    if said.get("optkit_sweep") != SCHEMA:
        what = f"the sweep has schema {said.get('optkit_sweep')}, and this optkit reads schema {SCHEMA}"
        raise StoreError(what, where=str(path), remedy=REMEDY)
    with reading(path, "the record is damaged", REMEDY, StoreError):
        return SweepRecord.model_validate(said)


@contextlib.contextmanager
def held(directory: Path, kept: Iterable[Path]) -> Iterator[None]:
    """Hold a sweep's directory, so that no two runs write one sweep.

    Raises StoreError if another run holds it, if there is something else, or if it lies in a directory that is
    `kept` as it is.
    """
    _check_place(directory, kept)
    with locked(directory, directory / LOCK, "another sweep is at work there", "the sweep"):
        yield


def _check_place(directory: Path, kept: Iterable[Path]) -> None:
    remedy = "Name another directory with --out"
    if holder := next((each for each in kept if real(directory).is_relative_to(real(each))), None):
        why = "A sweep writes files there, and a model or a store has to stay as it is"
        raise StoreError(f"lies in {holder}", where=str(directory), why=why, remedy=remedy)
    if directory.exists() and not directory.is_dir():
        raise StoreError("is a file", where=str(directory), remedy=remedy)
    if is_artifact(directory):
        why = "The artifacts of a sweep lie below its directory"
        raise StoreError("is an artifact", where=str(directory), why=why, remedy=remedy)
