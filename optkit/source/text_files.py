"""Read local texts: .txt, .jsonl, .parquet and the raw WikiText files.
Every complaint names the file and, if there is one, the line or row.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from optkit.common.files import check_regular, read_text, reading
from optkit.errors import SourceError, did_you_mean, needing

SUFFIXES = ".txt", ".jsonl", ".parquet"
RECORDS = SUFFIXES[1:]
"""Of files with records."""
INLINE = "data:;base64,"
"""Begins what stands for the bytes of a file in a row, as a URI of RFC 2397."""
WRITE = 'Write {"text": "..."} on each line'
SURROGATE = re.compile("[\ud800-\udfff]")


def read_rows(path: Path) -> list[str]:
    """Return the lines of a raw WikiText file as the hub's rows.
    A blank line is the empty string, a text line keeps its newline.
    """
    lines = read_text(path, most_bytes=None).removesuffix("\n").split("\n")
    return [f"{line}\n" if line.strip() else "" for line in lines]


def read_records(paths: Iterable[Path], field: str, files: bool = False) -> list[str]:
    """Return one field of each record; raises SourceError as `text_of` does, with file and line."""
    return [text_of(record, field, where, files) for path in paths for where, record in read_objects(path, field)]


def read_objects(path: Path, *fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a .jsonl file, each with file and line, or the rows of a .parquet file, of
    which these fields alone are read if it has them. Raises SourceError for other lines,
    MissingPackageError without pyarrow.
    """
    if path.suffix == ".parquet":
        yield from _rows_of(path, fields)
        return
    for number, line in enumerate(read_text(path, most_bytes=None).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        with reading(where, "the line is not JSON", WRITE):
            record = json.loads(line)
        if not isinstance(record, dict):
            raise SourceError(f"the line is not a JSON object but {line[:40]!r}", where=where, remedy=WRITE)
        yield where, record


def _rows_of(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    check_regular(path)
    with needing("pyarrow", str(path), "optkit[hub]"):
        from pyarrow.parquet import ParquetFile
    with reading(path, "not a whole Parquet file"):
        file = ParquetFile(path)
        # if one is missing all are read, and who asks for it says what there is
        columns = [*fields] if fields and {*fields} <= {*file.schema_arrow.names} else None
        rows = (row for batch in file.iter_batches(64, columns=columns) for row in batch.to_pylist())
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


def value_of(record: dict[str, Any], field: str, where: str, key: str = "field") -> Any:
    """Return a field of a record; raises SourceError, which names the key of YAML, if it is missing."""
    if field not in record:
        raise SourceError(
            f"there is no field '{field}'.{did_you_mean(field, record)}", where=where, remedy=f"Set `{key}:`"
        )
    return record[field]


def bytes_in(value: Any) -> bytes | None:
    """Return the bytes of a file that a row holds, `{"bytes": ..., "path": ...}`; None if it holds none."""
    found = value.get("bytes") if isinstance(value, dict) else None
    return found if isinstance(found, bytes) else None


def text_of(record: dict[str, Any], field: str, where: str, files: bool = False) -> str:
    """Return a field that is a text; with `files` the bytes of a file too, behind `INLINE`.
    Raises SourceError if it is missing or something else.
    """
    text = value_of(record, field, where, "input" if files else "field")
    if files and (content := bytes_in(text)) is not None:
        return INLINE + base64.b64encode(content).decode()
    if not isinstance(text, str):
        what = f"the field '{field}' is not a text but {json.dumps(text, default=str)[:40]}"
        raise SourceError(what, where=where, remedy="Name another with `field:`, or correct the file")
    if SURROGATE.search(text):
        raise SourceError(
            f"the field '{field}' holds half of a surrogate pair", where=where, why="No tokenizer takes that"
        )
    return text
