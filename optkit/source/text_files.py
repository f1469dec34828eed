"""Read local texts: .txt, .jsonl and the raw WikiText files.
Every complaint names the file and, if there is one, the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from optkit.common.files import read_text, reading
from optkit.errors import SourceError, did_you_mean

SURROGATE = re.compile("[\ud800-\udfff]")


def read_rows(path: Path) -> list[str]:
    """Return the lines of a raw WikiText file as the hub's rows.
    A blank line is the empty string, a text line keeps its newline.
    """
    lines = read_text(path, most_bytes=None).removesuffix("\n").split("\n")
    return [f"{line}\n" if line.strip() else "" for line in lines]


def read_records(paths: Iterable[Path], field: str) -> list[str]:
    """Return one field of each line of .jsonl files. Raises SourceError with file and line if it is
    missing.
    """
    return [_text(record, field, where) for path in paths for where, record in read_objects(path)]


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a .jsonl file, each with file and line. Raises SourceError for other
    lines.
    """
    for number, line in enumerate(read_text(path, most_bytes=None).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        with reading(where, "the line is not JSON", remedy=""):
            record = json.loads(line)
        if not isinstance(record, dict):
            raise SourceError(f"the line is not a JSON object but {line[:40]!r}", where=where)
        yield where, record


def value_of(record: dict[str, Any], field: str, where: str, key: str = "field") -> Any:
    """Return a field of a record; raises SourceError, which names the key of YAML, if it is missing."""
    if field not in record:
        raise SourceError(
            f"there is no field '{field}'.{did_you_mean(field, record)}", where=where, remedy=f"Set `{key}:`"
        )
    return record[field]


def _text(record: dict[str, Any], field: str, where: str) -> str:
    text = value_of(record, field, where)
    if not isinstance(text, str):
        raise SourceError(f"the field '{field}' is not a text but {json.dumps(text)[:40]}", where=where)
    if SURROGATE.search(text):
        raise SourceError(
            f"the field '{field}' holds half of a surrogate pair", where=where, why="No tokenizer takes that"
        )
    return text
