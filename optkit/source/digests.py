"""SHA-256 of files, remembered by path, size, time of change and inode.
So many gigabytes are read once and not at every run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optkit.common.atomic import remember
from optkit.common.files import object_if_any, sha256_of
from optkit.environment import cpu_threads
from optkit.errors import SourceError
from optkit.progress import Progress, SilentTask

REMEMBERED_BYTES = 1 << 20
"""Smaller files are read again each time; that is quicker than to be wrong."""
WORTH_SAYING_BYTES = 1 << 30
"""Fewer are read before anyone would ask."""
PREFIX = "sha256:"


def require_revision(what: str, found: str, wanted: str | None, where: str) -> None:
    """Raise SourceError if what a recipe pins is something else by now."""
    if wanted not in (None, found):
        raise SourceError(
            f"{what} is {found} and not {wanted}",
            where=where,
            why="It was changed, or comes from another version of its source",
            remedy="Restore it, or leave out `revision`",
        )


class FileDigests:
    """Digests of files, remembered in `digests.json` of a cache directory."""

    def __init__(self, cache: Path) -> None:
        self.file = cache / "digests.json"
        self._known: dict[str, dict[str, Any]] = _read(self.file)
        self._changed = False

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a file, from memory if it is the same file as before."""
        path = path.resolve()
        if path.stat().st_size < REMEMBERED_BYTES:
            return sha256_of(path)
        if not self._is_known(path):
            self._known[str(path)] = _identity(path) | {"sha256": sha256_of(path)}
            self._changed = True
        return str(self._known[str(path)]["sha256"])

    def of_all(self, files: Sequence[Path], progress: Progress | None = None) -> list[str]:
        """Return the SHA-256 of files, which are read side by side. What was read is kept by a stop."""
        unread = {path: path.stat().st_size >> 20 for path in files if not self._is_known(path.resolve())}
        total = sum(unread.values())
        said = f"reading {files[0].parent} once for its digest"
        task = progress.task(said, total, "MB") if progress and total >= WORTH_SAYING_BYTES >> 20 else SilentTask()
        found, pool = list[str](), ThreadPoolExecutor(cpu_threads())
        try:
            with task:
                for path, digest in zip(files, pool.map(self.of, files), strict=True):
                    found.append(digest)
                    self.save()
                    task.advance(unread.get(path, 0), path.name)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return found

    def _is_known(self, path: Path) -> bool:
        identity, known = _identity(path), self._known.get(str(path), {})
        return {name: known.get(name) for name in identity} == identity

    def save(self) -> None:
        """Write what was learnt, beside what other runs wrote meanwhile."""
        if not self._changed:
            return
        self._changed = False  # before: threads may learn more meanwhile
        remember(self.file, json.dumps(_read(self.file) | self._known, indent=1))


def _identity(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _read(file: Path) -> dict[str, dict[str, Any]]:
    known = object_if_any(file)
    return {path: entry for path, entry in known.items() if isinstance(entry, dict) and "sha256" in entry}
