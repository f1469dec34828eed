"""What ROOT/work of a store holds: checkpoints of unfinished steps, and teachers' answers.
Any student can use what a teacher said or wrote.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from optkit.common.files import is_directory, is_file, object_if_any, status_of, statuses_below
from optkit.common.frozen import Frozen
from optkit.store.store import Store
from optkit.training.shared_answers import ABOUT, IN_USE

STEP = re.compile(r"[0-9a-f]{64}")
UNFINISHED = "unfinished step"
KINDS = {"answers": "answers of a teacher", "generated": "text of a teacher"}


class StoredWork(Frozen):
    """One directory of work that a run can continue, or that another student can use."""

    name: str
    """Key of the unfinished step, or the kind and a digest of what else it is."""
    what: str
    """`unfinished step`, `answers of a teacher` or `text of a teacher`."""
    size_bytes: int
    last_use: float
    """Seconds since 1970."""


def survey_work(store: Store) -> tuple[StoredWork, ...]:
    """Return what lies there, the one used last first. What others made there is left out."""
    root = store.root / "work"
    places = [place for place in root.iterdir() if _is_work(place)] if root.is_dir() else []
    found = [work for place in places if (work := _described(place))]
    return tuple(sorted(found, key=lambda work: (-work.last_use, work.name)))


def _is_work(place: Path) -> bool:
    marks = (place / ABOUT, place / IN_USE)
    return is_directory(place) and (bool(STEP.fullmatch(place.name)) or any(map(is_file, marks)))


def delete_work(store: Store, work: StoredWork, *, dry_run: bool) -> bool:
    """Delete one of them; returns False, and leaves it, if a running process works on it."""
    place = store.root / "work" / work.name
    with _idle(store, place) as idle:
        if idle and not dry_run:
            shutil.rmtree(place, ignore_errors=True)
        return idle


@contextmanager
def _idle(store: Store, place: Path) -> Iterator[bool]:
    """Say whether no process works on it, and keep it so meanwhile."""
    if STEP.fullmatch(place.name):
        with store.idle(place.name) as idle:
            yield idle
        return
    with ExitStack() as held:
        try:
            fcntl.flock(held.enter_context((place / IN_USE).open("r")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            yield True
        except OSError:
            yield False
        else:
            yield True


def _described(place: Path) -> StoredWork | None:
    files, itself = statuses_below(place), status_of(place)
    return itself and StoredWork(
        name=place.name,
        what=UNFINISHED if STEP.fullmatch(place.name) else _kind(place),
        size_bytes=sum(status.st_size for status in files),
        last_use=max((status.st_mtime for status in files), default=itself.st_mtime),
    )


def _kind(place: Path) -> str:
    about = object_if_any(place / ABOUT)
    kind = KINDS.get(str(about.get("what")), "unknown work")
    teacher, count = about.get("teacher"), about.get("top_k")
    return f"{kind}{f' {Path(str(teacher)).name}' if teacher else ''}{f', top {count}' if count else ''}"
