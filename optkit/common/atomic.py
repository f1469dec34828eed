"""Files that appear whole or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Write a whole text file as `write_bytes_atomically` does."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a whole file by a rename, so that no reader ever sees a part of it."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
