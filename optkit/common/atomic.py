"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from optkit.common.held_files import hold


def write_text_atomically(path: Path, text: str) -> None:
    """Write a whole text file as `write_bytes_atomically` does."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a whole file by a rename, so that no reader ever sees a part of it; make its directory."""
    with drafted(path) as draft:
        draft.write_bytes(content)


@contextlib.contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Give a file beside `path` that takes its place when the block ends well, and goes when not.
    Its name is always the same, so what a kill leaves of it goes with the next one.
    """
    draft = draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold(draft, wait=True):
            try:
                yield draft
                draft.replace(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
    except OSError as error:
        error.filename = str(path)  # what was asked for says more than the draft
        raise


def draft_of(path: Path) -> Path:
    """Return where a file is written before it is whole."""
    return path.with_name(f".{path.name}.draft")


def remember(path: Path, text: str) -> None:
    """Write a memory, as `write_text_atomically` does: if it cannot be written, nothing else is lost."""
    with contextlib.suppress(OSError):
        write_text_atomically(path, text)
