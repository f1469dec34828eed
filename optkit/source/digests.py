"""SHA-256 of files, remembered by path, size, time of change and inode.
So many gigabytes are read once and not at every run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optkit.common.atomic import remember
from optkit.common.files import object_if_any, sha256_of

REMEMBERED_BYTES = 1 << 20
"""Smaller files are read again each time; that is quicker than to be wrong."""
PREFIX = "sha256:"


class FileDigests:
    """Digests of files, remembered in `digests.json` of a cache directory."""

    def __init__(self, cache: Path) -> None:
        self.file = cache / "digests.json"
        self._known: dict[str, dict[str, Any]] = _read(self.file)
        self._changed = False

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a file, from memory if it is the same file as before."""
        path = path.resolve()
        status = path.stat()
        if status.st_size < REMEMBERED_BYTES:
            return sha256_of(path)
        identity = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
        known = self._known.get(str(path), {})
        if {name: known.get(name) for name in identity} != identity:
            known = identity | {"sha256": sha256_of(path)}
            self._known[str(path)] = known
            self._changed = True
        return str(known["sha256"])

    def save(self) -> None:
        """Write what was learnt, beside what other runs wrote meanwhile."""
        if not self._changed:
            return
        self._changed = False  # before: threads may learn more meanwhile
        remember(self.file, json.dumps(_read(self.file) | self._known, indent=1))


def _read(file: Path) -> dict[str, dict[str, Any]]:
    known = object_if_any(file)
    return {path: entry for path, entry in known.items() if isinstance(entry, dict) and "sha256" in entry}
