"""Files and directories that a process holds (flock) while it works; the kernel frees them when it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ALIVE = "alive"
"""The file of a directory that its process holds."""


def hold(path: Path, *, wait: bool = False) -> IO[bytes]:
    """Return the file at `path`, made if missing and held by this process; closing it frees it.

    Raises BlockingIOError if another process holds it, unless this one shall `wait`;
    FileNotFoundError if its directory is gone. A link is not followed.
    """
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            file.close()
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        # Its holder unlinked it between the two calls, and another process may hold a new file of
        # this name.
        file.close()


def release(file: IO[bytes], path: Path) -> None:
    """Unlink a held file, then free it; so nobody unlinks what another process holds already."""
    with contextlib.suppress(OSError):
        path.unlink()
    file.close()


@contextlib.contextmanager
def held_directory(parent: Path, prefix: str, left_by: str | None = None) -> Iterator[Path]:
    """Give a new directory `parent/prefixRANDOM`, which is held, and deleted at the end.
    First those go that killed processes left: all that begin with `left_by`, or else with `prefix`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    delete_abandoned(parent, prefix if left_by is None else left_by)
    home, alive = _new_directory(parent, prefix)
    with alive:
        try:
            yield home
        finally:
            clear(home)


def delete_abandoned(parent: Path, prefix: str = "") -> None:
    """Delete the directories that begin so and whose process is gone. What a link leads to stays, and what is not
    empty and was never held: others made it.
    """
    for home in parent.iterdir():
        with contextlib.suppress(OSError):
            if home.name.startswith(prefix) and home.is_dir() and not home.is_symlink():
                if not (home / ALIVE).exists() and any(home.iterdir()):
                    continue
                with hold(home / ALIVE):
                    clear(home)


def clear(home: Path) -> None:
    """Delete a held directory, last of all the file that it is held by.
    So what a kill leaves of it is found again.
    """
    with contextlib.suppress(OSError):
        for each in home.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != ALIVE:
                each.unlink()
    shutil.rmtree(home, ignore_errors=True)


def _new_directory(parent: Path, prefix: str) -> tuple[Path, IO[bytes]]:
    while True:
        home = parent / f"{prefix}{secrets.token_hex(4)}"
        # Another process may take it for abandoned before it is held, and deletes it.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            home.mkdir()
            return home, hold(home / ALIVE)
