"""Isolated environments, one per library, built once and found again by what they were made of.

    ROOT/NAME-KEY/            a virtual environment; optkit.json in it says what it holds
    ROOT/draft-NAME-RANDOM/   one that is being built (renamed when it is finished, deleted when it fails) or removed
    ROOT/NAME.lock            held (flock) by the process that builds or removes
    ROOT/NAME.use             shared by the processes whose runs are at work in it; nothing is removed meanwhile
    ROOT/logs/NAME-PID.log    what the library printed in a run that failed, with the id of optkit's process;
                              the newest are kept

A key is made of the requirements, their lock, the Python and the installed torch: if one of them
changes, another environment is built.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from optkit.backends.installing import install, python_of
from optkit.backends.libraries import LIBRARIES, Library, find_library
from optkit.backends.lock import lock_digest
from optkit.backends.shared_torch import SharedTorch
from optkit.common.cache import cache_directory
from optkit.common.frozen import Frozen, digest
from optkit.environment import package_version
from optkit.errors import OptkitError
from optkit.processes.signals import take_lock
from optkit.progress import Progress

RECORD = "optkit.json"
NOTEWORTHY = ("transformers", "compressed-tensors", "accelerate", "numpy", "datasets")
"""Packages whose versions are told beside the library's own."""


class Environment(Frozen):
    """A finished environment."""

    name: str
    """Of the library."""
    directory: Path
    state: Literal["ready", "outdated"]
    """`outdated`: made for another Python, torch or set of requirements, of this installation before
    or of another one, which may use it still.
    """
    python: str
    torch: str
    versions: Mapping[str, str]
    """Distribution -> version, of everything in it."""
    size_bytes: int
    """On disk, without the torch that it shares."""
    created: str

    @property
    def interpreter(self) -> Path:
        """The Python to run a worker with."""
        return python_of(self.directory)

    @property
    def told_versions(self) -> dict[str, str]:
        """The versions that a record of work done here holds."""
        named = (LIBRARIES[self.name].distribution if self.name in LIBRARIES else self.name, *NOTEWORTHY)
        lowered = {name.lower().replace("_", "-"): version for name, version in self.versions.items()}
        others = {name: lowered[name] for name in named if name in lowered}
        return {"python": self.python, "torch": self.torch, **others}


class Environments:
    """A directory of environments that several processes may use at the same time."""

    def __init__(self, root: Path | None = None) -> None:
        """Take a directory: `root`, else `$OPTKIT_ENVS`, else `envs` of the cache.
        That is `$XDG_CACHE_HOME/optkit/envs`, else `~/.cache/optkit/envs`.
        """
        chosen = root or os.environ.get("OPTKIT_ENVS")
        self.root = Path(chosen) if chosen else cache_directory() / "envs"

    def find(self, name: str) -> Environment | None:
        """Return the environment of a library for this Python and this torch.
        None if it is not built.
        """
        return self._read(self._directory(find_library(name), SharedTorch()))

    def require(self, name: str, progress: Progress) -> Environment:
        """Return the environment of a library, built now if it is missing."""
        return self.find(name) or self.build(name, progress)

    @contextlib.contextmanager
    def using(self, name: str, progress: Progress) -> Iterator[Environment]:
        """Give the environment of a library, built now if it is missing.
        Nobody removes it meanwhile.
        """
        with self._open(f"{name}.use") as file:
            take_lock(file, fcntl.LOCK_SH)
            yield self.require(name, progress)

    def build(self, name: str, progress: Progress) -> Environment:
        """Build the environment of a library.
        It is returned as it is if another process has built it meanwhile.

        Raises OptkitError if it cannot be built; nothing is left of it then.
        """
        library, torch = find_library(name), SharedTorch()
        directory = self._directory(library, torch)
        with self._lock(name, progress):
            if found := self._read(directory):
                return found
            for abandoned in self.root.glob(f"draft-{name}-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            if directory.exists():
                shutil.rmtree(directory)
            progress.say(f"{name}: building its environment in {directory} (once; minutes)")
            started, draft = time.monotonic(), self._draft(name)
            try:
                versions = install(library, draft, torch, progress)
                record = {
                    "name": name,
                    "python": platform.python_version(),
                    "torch": torch.version,
                    "versions": versions,
                    "size_bytes": _size_bytes(draft),
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                    "seconds": round(time.monotonic() - started, 1),
                }
                (draft / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
                draft.rename(directory)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        built = self._read(directory)
        if built is None:
            raise OptkitError("it is gone again", where=str(directory), remedy=f"Run: optkit env build {name}")
        return built

    def list(self) -> list[Environment]:
        """Return all finished environments, by name, those that are in use first."""
        found = [self._read(path.parent) for path in self.root.glob(f"*/{RECORD}")]
        return sorted(
            (each for each in found if each), key=lambda each: (each.name, each.state != "ready", each.directory.name)
        )

    def remove(self, name: str, progress: Progress) -> tuple[Environment, ...]:
        """Delete every environment of a library, the outdated ones too.

        Raises OptkitError if there is none, and if a run is at work in one.
        """
        find_library(name)
        with self._lock(name, progress), self._open(f"{name}.use") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                what, why = (
                    f"a run is at work in the environment of '{name}'",
                    "Its library would be gone from under it",
                )
                remedy = "Remove it when the run has ended"
                raise OptkitError(what, where=str(self.root), why=why, remedy=remedy) from error
            found = tuple(each for each in self.list() if each.name == name)
            for each in found:
                each.directory.rename(self._draft(name))
            for removed in self.root.glob(f"draft-{name}-*"):
                shutil.rmtree(removed)
        if not found:
            what, remedy = f"no environment of '{name}' is built", "See which are: optkit env list"
            raise OptkitError(what, where=str(self.root), remedy=remedy)
        return found

    def log(self, name: str) -> Path:
        """Return where the output of a library's run in this process is kept if it fails."""
        return self.root / "logs" / f"{name}-{os.getpid()}.log"

    def _draft(self, name: str) -> Path:
        return self.root / f"draft-{name}-{secrets.token_hex(4)}"

    def _directory(self, library: Library, torch: SharedTorch) -> Path:
        return self.root / f"{library.name}-{_key(library, torch)}"

    def _read(self, directory: Path) -> Environment | None:
        try:
            record: dict[str, Any] = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        library = LIBRARIES.get(record["name"])
        current = library and package_version("torch") and self._directory(library, SharedTorch()) == directory
        known = {field: record[field] for field in Environment.model_fields if field in record}
        return Environment(**known, directory=directory, state="ready" if current else "outdated")

    @contextlib.contextmanager
    def _lock(self, name: str, progress: Progress) -> Iterator[None]:
        with self._open(f"{name}.lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                progress.say(f"{name}: another process is building its environment; waiting for it")
                take_lock(file, fcntl.LOCK_EX)
            yield

    def _open(self, name: str) -> IO[str]:
        """Open a file to lock."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            return (self.root / name).open("a")
        except OSError as error:
            what, remedy = "environments cannot be kept here", "Name another place with $OPTKIT_ENVS"
            raise OptkitError(what, where=str(self.root), why=f"{error.strerror}", remedy=remedy) from error


def _key(library: Library, torch: SharedTorch) -> str:
    python = f"{sys.implementation.name} {platform.python_version()} {sys.base_prefix}"
    made_of = asdict(library) | {"variables": {}, "summary": ""}
    shared = [torch.version, str(torch.place)]
    return digest({"library": made_of, "lock": lock_digest(library), "python": python, "torch": shared})[:12]


def _size_bytes(directory: Path) -> int:
    """Return the bytes of all files below a directory; links are not followed."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_symlink() and path.is_file())
