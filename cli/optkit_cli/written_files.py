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
