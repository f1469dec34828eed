"""Whether two tokenizers mean the same by a number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from optkit.common.files import read_object, reading


def other_token(theirs: Path, ours: Path) -> tuple[str, int | str, int] | None:
    """Return the first token that two tokenizer.json number differently, and both numbers.

    None if there is no such token, or a directory has no tokenizer.json.
    """
    first, second = _vocabulary(theirs), _vocabulary(ours)
    if first is None or second is None:
        return None
    other = next((token for token in second if first.get(token) != second[token]), None)
    return None if other is None else (other, first.get(other, "unknown"), second[other])


def _vocabulary(directory: Path) -> Mapping[str, int] | None:
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    found = read_object(file)
    with reading(file, "is no tokenizer of the library tokenizers"):
        vocabulary = found.get("model", {}).get("vocab")
        if isinstance(vocabulary, list):  # Unigram: [token, score], the id is the place
            return {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    return vocabulary if isinstance(vocabulary, dict) else None
