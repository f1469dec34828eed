"""What was written and whether it was changed since: the files of a step, and JSON documents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from optkit.common.files import sha256_of
from optkit.common.frozen import digest


def list_files(directory: Path) -> list[str]:
    """Return the relative names of all files below a directory, sorted, with forward slashes."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def make_readable(directory: Path) -> None:
    """Give all files the rights that the user's umask gives to new ones.
    safetensors writes for the owner alone.
    """
    mask = os.umask(0)
    os.umask(mask)
    for name in list_files(directory):
        path = directory / name
        path.chmod(path.stat().st_mode | (0o666 & ~mask))


def describe_file(path: Path) -> dict[str, Any]:
    """Return size, time of the last change and SHA-256 of a file."""
    status = path.stat()
    return {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}


def is_unchanged(path: Path, known: Any) -> bool:
    """Say whether a file is still what `describe_file` saw.
    It is read again only if its time of change differs.

    It is not if `known`, which comes out of a file too, is no such description.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    if not isinstance(known, dict) or status.st_size != known.get("size_bytes"):
        return False
    return bool(status.st_mtime_ns == known.get("mtime_ns") or sha256_of(path) == known.get("sha256"))


def sealed(value: Any) -> str:
    """Return a value as JSON, together with its digest."""
    return json.dumps({"digest": digest(value), "value": value}, indent=1, allow_nan=False)


def unsealed(text: bytes | str) -> Any | None:
    """Return the value that `sealed` wrote; None if the text was changed or cut off since."""
    try:
        found = json.loads(text)
        whole = isinstance(found, dict) and found["digest"] == digest(found["value"])
    except (ValueError, KeyError, RecursionError):
        return None
    return found["value"] if whole else None
