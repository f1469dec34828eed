"""Files that a process holds (flock) while it works; the kernel frees them when it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO


def hold(path: Path) -> IO[str]:
    """Return the file at `path`, made if missing and held by this process; closing it frees it.

    Raises BlockingIOError if another process holds it, FileNotFoundError if its directory is
    gone.
    """
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        if _is_at(file, path):
            return file
        # Its holder unlinked it between the two calls, and another process may hold a new file of
        # this name.
        file.close()


def release(file: IO[str], path: Path) -> None:
    """Unlink a held file, then free it; so nobody unlinks what another process holds already."""
    with contextlib.suppress(OSError):
        path.unlink()
    file.close()


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
