"""The directory of compiled libraries and CUDA binaries, to which nobody else can write.
Each file lies under the digest of its own bytes.

A library runs as soon as it is loaded, so one that was cut off, changed or put there by others must
never be.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
LENGTH = 32
"""Hexadecimal digits of a digest in a name."""
SUFFIXES = (".so", ".cubin")


def private_directory(directory: Path) -> Path:
    """Return a directory that is this user's alone; make it if it is missing.
    What others could have written in it is deleted.

    Raises OSError if it is a link, or another user's.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(f"{directory} is a link, and where it leads others may write; delete it")
    if status.st_uid != os.geteuid():
        raise OSError(
            f"{directory} belongs to another user (id {status.st_uid}); name another place with $XDG_CACHE_HOME"
        )
    if stat.S_IMODE(status.st_mode) != stat.S_IRWXU:
        directory.chmod(stat.S_IRWXU)
        if status.st_mode & OTHERS_WRITE:
            for path in directory.iterdir():
                if path.suffix in SUFFIXES:
                    path.unlink()
    return directory


def kept_library(directory: Path, made_of: str, suffix: str = ".so") -> Path | None:
    """Return the library kept under this digest, None if there is none; delete a changed one."""
    for path in sorted(directory.glob(f"{made_of}-*{suffix}")):
        if not path.is_symlink() and path.is_file() and path == _place(directory, made_of, path):
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def keep_library(made: Path, directory: Path, made_of: str) -> Path:
    """Move a library into the directory, under a name by which `kept_library` finds it whole."""
    return made.replace(_place(directory, made_of, made))


def _place(directory: Path, made_of: str, file: Path) -> Path:
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    return directory / f"{made_of}-{content[:LENGTH]}{file.suffix}"
