"""The directory that a run writes an artifact to, held by one run and replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from optkit.common.held_files import hold, release
from optkit.common.own_files import RECORD
from optkit.errors import StoreError
from optkit.store.store import explain_os_error


def settle(out: Path) -> Path:
    """Return the directory that a path to write to means. Links, `.` and `..` are followed."""
    return real(out) if out.is_symlink() or out.name in ("", "..") else out


def real(path: Path) -> Path:
    """Return where a path leads. `Path.resolve` raises RuntimeError for links that lead back to themselves."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def reserve(out: Path, store: Path, models: Iterable[Path] = ()) -> Iterator[None]:
    """Hold an output directory for this process, so that two runs never write one artifact.
    What a killed one left there is mended.

    Raises StoreError if another run holds it, if it holds files that are not ours, if one
    of it and the store, or of it and a model that is read, lies inside the other, if the process
    stands in it, or if it cannot be written.
    """
    refuse_models(out, models)
    _check_place(out, store)
    with locked(out, out.with_name(f".{out.name}.lock"), "another optkit run is writing there", "the artifact"):
        settle_beside(out)
        yield


@contextlib.contextmanager
def locked(out: Path, lock: Path, busy: str, what: str) -> Iterator[None]:
    """Hold the lock of a directory that a run writes to. Raises StoreError if another run holds it: `busy`;
    or if the lock cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = hold(lock)
    except BlockingIOError as error:
        remedy = "Wait for it, or name another directory with --out"
        raise StoreError(busy, where=str(out), remedy=remedy) from error
    except OSError as error:
        raise explain_os_error(error, what, lock.parent) from error
    try:
        yield
    finally:
        release(held, lock)


def _check_place(out: Path, store: Path) -> None:
    place, shelf = real(out), real(store)
    if place.is_symlink() or (out.exists() and not out.is_dir()):
        what = "is a link that leads back to itself" if place.is_symlink() else "is a file"
        raise StoreError(what, where=str(out), remedy="Name a directory with --out")
    if place.is_relative_to(shelf) or shelf.is_relative_to(place):
        inside = "is the store itself" if place == shelf else "lies in the store"
        how = inside if place.is_relative_to(shelf) else "holds the store"
        why = "An artifact is replaced as a whole, and finished steps would go with it"
        remedy = "Name another directory with --out, or another store with --store"
        raise StoreError(f"{how} ({shelf})", where=str(out), why=why, remedy=remedy)
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        what, why = "the directory holds files that optkit did not write", "They would be replaced"
        raise StoreError(what, where=str(out), why=why, remedy="Empty it, or name another directory with --out")
    if Path.cwd().is_relative_to(place):
        what, why = "is the directory that you are in", "It would be replaced"
        raise StoreError(what, where=str(out), why=why, remedy="Name another with --out")


def refuse_models(out: Path, models: Iterable[Path]) -> None:
    """Raise StoreError if one of an output directory and a model that is read lies inside the other."""
    place = real(out)
    for model in map(real, models):
        if place.is_relative_to(model) or model.is_relative_to(place):
            inside = "is the model itself" if place == model else "lies in the model's directory"
            how = inside if place.is_relative_to(model) else "holds the model"
            why = "An artifact is replaced as a whole, and a model has to stay as it is"
            raise StoreError(f"{how} ({model})", where=str(out), why=why, remedy="Name another directory with --out")


def settle_beside(out: Path) -> None:
    """Put the artifact back that a run moved aside and never replaced.
    What else unfinished runs left beside `out` is deleted.
    """
    for each in list(out.parent.iterdir()):
        if each.name.startswith(f".{out.name}.old-") and not out.exists():
            with contextlib.suppress(OSError):
                each.rename(out)
        elif each.name.startswith((f".{out.name}.old-", f".{out.name}.draft-")):
            shutil.rmtree(each, ignore_errors=True)


def place(source: Path, target: Path, *, link: bool) -> bool:
    """Make `target` the same file as `source`, and return whether it is a link.
    It is a hard link if asked for and possible, else a copy.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        with contextlib.suppress(OSError):
            target.hardlink_to(source)
            return True
    shutil.copyfile(source, target)
    return False
