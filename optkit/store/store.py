"""Finished steps and metrics, by the key of what made them: key in, draft, rename.

    ROOT/steps/KEY/model/...      what a step left
    ROOT/steps/KEY/record.json    how: kind, fields, report, seconds, and size, time and SHA-256 of each file
    ROOT/metrics/KEY.json         what an eval measured, with its digest
    ROOT/counts/DIGEST.json       how many tokens a text has, for plans
    ROOT/history/DIGEST.json      an artifact that a run made, for `optkit history`
    ROOT/drafts/KEY-RANDOM/       work under way; a draft whose process is gone is deleted by the next run
    ROOT/work/KEY/...             what a step under way keeps for the case that it is killed: checkpoints, blocks
    ROOT/work/answers-DIGEST/...  what a teacher said about a text, for any student (generated-DIGEST: what it wrote)
    ROOT/locks/KEY.lock           held (flock) by the process that works on KEY; the kernel frees it when that
                                  process dies
    ROOT/locks/KEY.use            shared by the processes whose runs need a step or a metric; `optkit store
                                  prune` leaves it

The time of the last change of record.json and KEY.json is that of the last use: when a plan or a
run last asked for it.

Nothing is found by `get` before it is whole: a draft becomes an entry by one rename. Failures are
never stored.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optkit.common.files import read_json, read_text
from optkit.common.held_files import ALIVE, clear, delete_abandoned, held_directory, hold
from optkit.common.out_of_resources import NO_ROOM, more_room
from optkit.errors import ResourceError, StoreError
from optkit.processes.signals import take_lock
from optkit.store.files import describe_file, is_unchanged, list_files, make_readable, sealed, unsealed
from optkit.store.records import is_measured, is_record

RECORD = "record.json"
READ_ONLY = errno.EACCES, errno.EPERM, errno.EROFS
"""What a store says to those who can only read it, one that is mounted so too."""


@dataclass
class Draft:
    """A step under way.
    `model` is the directory to fill, `record` is what will be remembered of it.
    """

    model: Path
    record: dict[str, Any] = field(default_factory=lambda: {"kind": "step", "seconds": 0.0, "report": {}})
    expected: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file, if it is known before."""


class Store:
    """A directory of finished work that several processes may use at the same time."""

    def __init__(self, root: Path, elsewhere: str = "name another place with --store") -> None:
        """Take its directory, and what a user may do if that has no room."""
        self.root, self.elsewhere = Path(root), elsewhere

    def get(self, key: str) -> Path | None:
        """Return the directory that a finished step left.
        None if there is none or it was damaged since.
        """
        record = self._read_record(key)
        if record is None or self._damaged(key, record):
            return None
        note_use(self._entry(key) / RECORD)
        return self._entry(key) / "model"

    def fetch(self, key: str) -> Path | None:
        """Take a finished step from the store that machines share and return its directory; None if
        there is nothing to take. It holds `lock(key)` meanwhile.
        """
        return None

    def push(self, key: str) -> None:
        """Give a finished step to the store that machines share, if there is one."""
        return

    def is_remote(self, key: str) -> bool:
        """Say whether the store that machines share has a step, so that `fetch` may take it."""
        return False

    def workspace(self, key: str) -> Path:
        """Return the directory of what a step keeps until it is finished; nothing is made."""
        return self.root / "work" / key

    def forget_work(self, key: str) -> None:
        """Delete what a kill behind a finished step left of its work, unless a process is at it or the store is
        another user's.
        """
        if (place := self.workspace(key)).exists():
            with contextlib.suppress(StoreError, ResourceError), self._alone(f"{key}.lock") as alone:
                if alone:
                    shutil.rmtree(place, ignore_errors=True)

    def is_damaged(self, key: str) -> bool:
        """Say whether there is an entry that `get` does not give out.
        It was changed since it was finished.
        """
        return self._entry(key).exists() and self.get(key) is None

    def record(self, key: str) -> dict[str, Any]:
        """Return the record of a finished step; raises StoreError if there is none."""
        record = self._read_record(key)
        if record is None:
            raise StoreError("there is no such entry", where=str(self._entry(key)))
        return record

    def get_json(self, key: str) -> Any | None:
        """Return what `put_json` kept under this key.
        None if there is nothing or it was changed since.
        """
        path = self.root / "metrics" / f"{key}.json"
        with contextlib.suppress(StoreError):
            found = unsealed(read_text(path, StoreError))
            if is_measured(found):
                note_use(path)
                return found
        return None

    def is_damaged_json(self, key: str) -> bool:
        """Say whether there is an entry that `get_json` does not give out.
        It was changed since it was kept.
        """
        return (self.root / "metrics" / f"{key}.json").exists() and self.get_json(key) is None

    def take_json(self, key: str) -> Any:
        """Return what `put_json` kept under this key; raises StoreError if there is nothing."""
        found = self.get_json(key)
        if found is None:
            raise StoreError(
                "the entry is gone", where=str(self.root / "metrics" / f"{key}.json"), remedy="Run the command again"
            )
        return found

    def check_writable(self) -> None:
        """Raise StoreError or ResourceError if nothing can be kept.
        It is asked before hours are spent on what would be lost.
        """
        with self._explaining("the metrics"), tempfile.TemporaryFile(dir=self._directory("metrics")):
            pass

    def put_json(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key; readers see the old one or the new one, never half."""
        with self._explaining("the metrics"), self._drafting(key) as home:
            draft = home / f"{key}.json"
            draft.write_text(sealed(value), encoding="utf-8")
            draft.replace(self._directory("metrics") / draft.name)

    @contextlib.contextmanager
    def lock(self, key: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold a key for this process.
        Calls `waiting` once if another process holds it, and waits until it is free.
        """
        with self._explaining("the lock"):
            file = (self._directory("locks") / f"{key}.lock").open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                waiting()
                take_lock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def using(self, keys: Iterable[str]) -> Iterator[None]:
        """Keep the entries of these keys from being pruned meanwhile.
        They need not be there already.

        A store that this user can only read is used without: only its owner could prune it.
        """
        with contextlib.ExitStack() as held:
            try:
                for key in sorted(set(keys)):
                    file = held.enter_context((self._directory("locks") / f"{key}.use").open("a"))
                    take_lock(file, fcntl.LOCK_SH)
            except OSError as error:
                if error.errno not in READ_ONLY:
                    raise explain_os_error(error, "the lock", self.root, self.elsewhere) from error
            yield

    @contextlib.contextmanager
    def idle(self, key: str) -> Iterator[bool]:
        """Say whether no process works on a key and no run needs it, and keep it so meanwhile."""
        with self._alone(f"{key}.lock", f"{key}.use") as alone:
            yield alone

    @contextlib.contextmanager
    def unused(self, key: str) -> Iterator[bool]:
        """Say whether no run needs a metric, and keep it so meanwhile."""
        with self._alone(f"{key}.use") as alone:
            yield alone

    def delete(self, key: str) -> None:
        """Delete an entry, if there still is one; call it inside `idle(key)`. Artifacts are whole
        afterwards: their files are links of their own, or copies.
        """
        if not self._entry(key).exists():
            return
        with self._explaining("a draft"):
            home = self._directory("drafts") / f"{key}-{secrets.token_hex(4)}"
            with hold(self._entry(key) / ALIVE):
                self._entry(key).rename(home)
                clear(home)

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Draft]:
        """Give a draft to fill.
        When the block ends well it becomes the entry, when it fails nothing is left of it.

        Raises ResourceError on a full disk, StoreError if the store cannot be written, or a file is
        not what was expected.
        """
        with self._explaining(f"the step {key[:12]}"), self._drafting(key) as home:
            draft = Draft(home / "model")
            draft.model.mkdir()
            yield draft
            make_readable(draft.model)
            draft.record["files"] = {name: describe_file(draft.model / name) for name in list_files(draft.model)}
            found = {name: known["sha256"] for name, known in draft.record["files"].items()}
            if wrong := [name for name, sha256 in draft.expected.items() if found.get(name) != sha256]:
                raise StoreError(f"{', '.join(wrong)}: not what its record says", where=f"the step {key[:12]}")
            (home / RECORD).write_text(json.dumps(draft.record, indent=1, allow_nan=False), encoding="utf-8")
            entry = self._directory("steps") / key
            if entry.exists():
                self.delete(key)
            # Still held: a draft that nobody holds may be deleted at any time, and this one is
            # finished work.
            home.rename(entry)
            (entry / ALIVE).unlink()

    def delete_abandoned_drafts(self) -> None:
        """Delete the drafts whose process is gone."""
        delete_abandoned(self._directory("drafts"))

    def _drafting(self, key: str) -> contextlib.AbstractContextManager[Path]:
        """Return a directory that is held while this process works in it."""
        return held_directory(self.root / "drafts", f"{key}-", left_by="")

    @contextlib.contextmanager
    def _alone(self, *names: str) -> Iterator[bool]:
        """Say whether no process holds any of these locks, and keep it so meanwhile."""
        with contextlib.ExitStack() as held:
            for name in names:
                with self._explaining("the lock"):
                    file = held.enter_context((self._directory("locks") / name).open("a"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    yield False
                    return
            yield True

    def _entry(self, key: str) -> Path:
        return self.root / "steps" / key

    def _read_record(self, key: str) -> dict[str, Any] | None:
        return read_record(self._entry(key))

    def _damaged(self, key: str, record: dict[str, Any]) -> bool:
        return any(
            not is_unchanged(self._entry(key) / "model" / name, known) for name, known in record["files"].items()
        )

    def _directory(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explain_os_error(error, what, self.root, self.elsewhere) from error


def explain_os_error(
    error: OSError, what: str, place: Path, elsewhere: str = "name another place with --out"
) -> ResourceError | StoreError:
    """Return the optkit error for a failed write of `what` under `place`.
    A full disk is told apart from everything else. `elsewhere` is what to do then.
    """
    if error.errno in NO_ROOM:
        free = f"{shutil.disk_usage(place).free:,} bytes are free" if place.exists() else ""
        return ResourceError(
            f"{NO_ROOM[error.errno]} while writing {what}",
            where=str(place),
            why=free,
            remedy=more_room(error.errno, elsewhere),
        )
    return StoreError(
        f"cannot write {what}",
        where=str(place),
        why=f"{error.strerror or error}",
        remedy=elsewhere[0].upper() + elsewhere[1:],
    )


def read_record(entry: Path) -> dict[str, Any] | None:
    """Return the record of a step's directory; None if there is none that can be followed."""
    with contextlib.suppress(StoreError):
        found = read_json(entry / RECORD, StoreError)
        return found if is_record(found) else None
    return None


def note_use(path: Path) -> None:
    """Set a file's time of change to now; nothing happens if the store is another's."""
    with contextlib.suppress(OSError):
        os.utime(path)
