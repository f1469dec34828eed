"""Files of others.
Regular ones alone are read, and whatever is malformed in one is said as the file's fault.

A named pipe would hang, a device never ends, and a parser that meets what it does not expect raises
anything. Each format has one function that reads it into typed data, inside `reading`.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from optkit.common.out_of_resources import is_out_of_memory
from optkit.errors import OptkitError, SourceError, opening_of

MOST_BYTES = 1 << 30
"""More than any JSON or text beside a model has."""
LONGEST_NAME = 255
"""Bytes that systems of files take."""
AGAIN = "Copy or download it again"


@contextlib.contextmanager
def reading(path: Path | str, what: str, remedy: str = AGAIN, error: type[OptkitError] = SourceError) -> Iterator[None]:
    """Turn whatever goes wrong inside into `PATH: WHAT. Why. REMEDY.`, e.g. with "is not an index
    of safetensors".

    Errors of optkit pass, and memory that ran out.
    """
    try:
        yield
    except OptkitError:
        raise
    except BaseException as cause:
        panic = type(cause).__name__ == "PanicException"  # of Rust; no Exception
        if not (isinstance(cause, Exception) or panic) or is_out_of_memory(cause):
            raise
        raise error(what, where=_printable(path), why=_said(cause), remedy=remedy) from cause


def _said(error: BaseException) -> str:
    """Return the first line of what an exception says, with its kind if that says little."""
    if isinstance(error, RecursionError):
        return "It is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ValueError) and callable(problems := getattr(error, "errors", None)):  # of pydantic
        problem = next(iter(problems()))
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"[:200]
    first = opening_of(error)[:200]
    says_enough = first and (isinstance(error, ValueError | EOFError) or type(error) is Exception)
    return first if says_enough else f"{type(error).__name__}: {first}".removesuffix(": ")


def check_regular(path: Path, error: type[OptkitError] = SourceError) -> int:
    """Return the bytes of a regular file. Raises `error` for what is none: a directory, a pipe, a
    device, nothing.
    """
    with open_file(path, error) as file:
        return os.fstat(file.fileno()).st_size


def remedy_of(error: BaseException) -> str:
    """Return what to do about a failure to open a file, if more can be said than what happened."""
    return "Change its rights with chmod, or ask its owner to" if isinstance(error, PermissionError) else ""


@contextlib.contextmanager
def open_file(path: Path, error: type[OptkitError] = SourceError) -> Iterator[BufferedReader]:
    """Open a regular file to read it.
    Raises `error` for any other, without waiting for a pipe's other end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as cause:
        why = getattr(cause, "strerror", None) or str(cause)
        raise error("cannot be read", where=_printable(path), why=why, remedy=remedy_of(cause)) from cause
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        why = "A pipe or a device is not read"
        raise error("is no regular file", where=str(path), why=why, remedy="Copy it to a file")
    with open(descriptor, "rb") as file:  # noqa: PTH123
        yield file


def check_kinds(directory: Path) -> None:
    """Raise SourceError for a pipe, socket or device in a directory.
    Whoever reads a file of that name would wait for ever.
    """
    with os.scandir(directory) as entries:
        kinds = {entry.name: stat.S_IFMT(mode_of(Path(entry.path))) for entry in entries}
    if odd := [name for name, kind in kinds.items() if kind not in (0, stat.S_IFREG, stat.S_IFDIR)]:
        what, why = f"{odd[0]} is no regular file", "A pipe or a device is not read"
        raise SourceError(what, where=str(directory), why=why, remedy="Remove it")


def _printable(path: Path | str) -> str:
    return str(path).replace("\0", "\\0")


def read_text(path: Path, error: type[OptkitError] = SourceError, most_bytes: int | None = MOST_BYTES) -> str:
    """Return the text of a regular file of UTF-8. Raises `error` if it cannot be read, is too
    large or something else.
    """
    with open_file(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            raise error(f"{size:,} bytes are too many", where=str(path), why=f"Such a file has at most {most_bytes:,}")
        content = file.read()
    if content.startswith(codecs.BOM_UTF8):
        what, why = "it begins with a byte order mark", "To a parser or a tokenizer that is a character of the text"
        raise error(what, where=str(path), why=why, remedy="Remove it: tail -c +4 OLD > NEW")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        likely = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        what, remedy = f"byte {cause.start:,} is not UTF-8", f"Convert it: iconv -f {likely} -t utf-8 OLD > NEW"
        raise error(what, where=str(path), why=cause.reason, remedy=remedy) from cause


def read_json(path: Path, error: type[OptkitError] = SourceError, remedy: str = "") -> Any:
    """Return what a file of JSON holds. Raises `error` if it cannot be read as JSON."""
    from pydantic_core import from_json  # three times as fast as json

    text = read_text(path, error)
    with reading(path, "cannot be read as JSON", remedy, error):
        return from_json(text)


def read_object(path: Path, error: type[OptkitError] = SourceError, remedy: str = "") -> dict[str, Any]:
    """Return the object that a file of JSON holds. Raises `error` if it holds none."""
    found = read_json(path, error, remedy)
    if not isinstance(found, dict):
        raise error("is not a JSON object", where=str(path), why=f"It is {json.dumps(found)[:40]}", remedy=remedy)
    return found


def object_if_any(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, an empty one if there is none or it cannot be read.
    It is for what is only a memory, and if others say what is wrong with the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def texts_of(value: Any) -> Mapping[str, str]:
    """Return an object whose values are texts; raises ValueError for any other value."""
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not an object")
    wrong = next((name for name, each in value.items() if not isinstance(each, str)), None)
    if wrong is not None:
        raise ValueError(f"{wrong}: {shown(value[wrong])} is not text")
    return value


def check_name(name: str) -> None:
    """Raise ValueError for what no file can be named."""
    if not name or "\0" in name or len(name.encode(errors="replace")) > LONGEST_NAME:
        raise ValueError(f"{shown(name)} is no name of a file")


def check_name_inside(name: str) -> None:
    """Raise ValueError unless a name means a file inside the directory that names it."""
    check_name(name)
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{shown(name)} is no file inside the directory")


def mode_of(path: Path) -> int:
    """Return the `st_mode` of what a path leads to.
    It is 0 if nothing is there, or no system of files would take the name.
    """
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file or directory itself; None if none is there, or none that this user may see."""
    with contextlib.suppress(OSError):
        return os.lstat(path)
    return None


def statuses_below(directory: Path) -> list[os.stat_result]:
    """Return the status of each regular file below a directory; what other processes delete meanwhile is left out."""
    paths = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return [status for path in paths if (status := status_of(path)) and stat.S_ISREG(status.st_mode)]


def is_file(path: Path) -> bool:
    """Say whether there is such a regular file."""
    return stat.S_ISREG(mode_of(path))


def is_directory(path: Path) -> bool:
    """Say whether there is such a directory."""
    return stat.S_ISDIR(mode_of(path))


def shown(value: Any) -> str:
    """Return a value of JSON, short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
