"""Files that options name for what a command writes."""

from __future__ import annotations

from pathlib import Path


def refuse_other(path: Path, option: str, what: str, *starts: bytes) -> None:
    """Raise UsageError if a file is there that is not empty and begins with none of the texts, in lower case, with
    which what will be written begins: it would be lost.
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
