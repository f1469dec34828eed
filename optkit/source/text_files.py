"""Read local texts: .txt, .jsonl and the raw WikiText files.
Every complaint names the file and, if there is one, the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

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
    return [text for path in paths for text in _records(path, field)]


def _records(path: Path, field: str) -> list[str]:
    texts = []
    for number, line in enumerate(read_text(path, most_bytes=None).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        with reading(where, "the line is not JSON", remedy=""):
            record = json.loads(line)
        if not isinstance(record, dict):
            raise SourceError(f"the line is not a JSON object but {line[:40]!r}", where=where)
        if field not in record:
            raise SourceError(
                f"there is no field '{field}'.{did_you_mean(field, record)}", where=where, remedy="Set `field:`"
            )
        if not isinstance(record[field], str):
            raise SourceError(f"the field '{field}' is not a text but {json.dumps(record[field])[:40]}", where=where)
        if SURROGATE.search(record[field]):
            raise SourceError(
                f"the field '{field}' holds half of a surrogate pair", where=where, why="No tokenizer takes that"
            )
        texts.append(record[field])
    return texts
