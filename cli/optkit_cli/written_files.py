"""Files that options name for what a command writes."""

from __future__ import annotations

from pathlib import Path


def refuse_other(path: Path, option: str, what: str, *starts: bytes) -> None:
    """Raise UsageError if another file is there than one that the command writes: it would be lost.
    starts: how the command's files begin, in lower case. An empty file may be replaced.
    """
    from optkit.errors import UsageError

    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(1024).lstrip().lower()
    if begin and not begin.startswith(starts):
        raise UsageError(
            f"is a file and no {what}", where=f"{option} {path}", why="It would be replaced", remedy="Name another"
        )


def write_named(path: Path, content: bytes) -> None:
    """Write a whole file. A link, a device or a pipe stays what it is: what it leads to is written."""
    from optkit.common.atomic import write_bytes_atomically

    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        write_bytes_atomically(path, content)
