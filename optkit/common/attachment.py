"""A file that is left beside a scorecard: a picture, a table, whatever says more than its numbers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optkit.common.byte_sizes import size_text
from optkit.errors import EvalError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MEDIA_TYPE = re.compile(r"[a-z]+/[a-z0-9][a-z0-9.+-]*")
MOST_BYTES = 32 * 2**20
"""A file is kept with the numbers in the store, and read whole."""
TEXTS = re.compile(r"text/.*|.*[/+](json|xml|yaml|csv)")


@dataclass(frozen=True)
class Attachment:
    """A file with its name and media type (RFC 6838). Raises EvalError for a name that is none."""

    name: str
    """Letters, digits, dot, dash and underscore, 100 of them at most; it begins with a letter or digit."""
    content: bytes
    media_type: str = "application/octet-stream"
    """E.g. `image/svg+xml`, `text/csv`; texts are UTF-8."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            what, why = f"{self.name!r} is no name for a file", "It would lie elsewhere, or nowhere on some systems"
            remedy = "Use letters, digits, dot, dash and underscore, 100 of them at most"
            raise EvalError(f"{what} beside a scorecard", where="attachment", why=why, remedy=remedy)
        what = ""
        if not MEDIA_TYPE.fullmatch(self.media_type):
            what, remedy = f"{self.media_type!r} is no media type", "Name one such as image/svg+xml"
        elif not isinstance(self.content, bytes):
            what, remedy = f"its content is {type(self.content).__name__} and not bytes", "Encode it as UTF-8"
        elif (size := len(self.content)) > MOST_BYTES:
            what, remedy = (
                f"it has {size_text(size)}, and at most {size_text(MOST_BYTES)} are kept",
                "Leave a smaller file",
            )
        if what:
            raise EvalError(what, where=self.name, remedy=remedy)

    @classmethod
    def of_records(cls, name: str, records: Iterable[Mapping[str, Any]]) -> Attachment:
        """Return a file with a JSON object on each line."""
        lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records)
        return cls(name, lines.encode(), "application/jsonl")

    def records(self) -> list[dict[str, Any]]:
        """Return what `of_records` was given."""
        return [json.loads(line) for line in self.content.decode().splitlines()]

    @property
    def is_text(self) -> bool:
        """Whether people read it as text, so that it must not name places on this machine."""
        return bool(TEXTS.fullmatch(self.media_type))

    def to_json(self) -> dict[str, str]:
        """Return the file as a JSON value."""
        content = base64.b64encode(self.content).decode("ascii")
        return {"name": self.name, "media_type": self.media_type, "base64": content}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Attachment:
        """Return the file that `to_json` described."""
        return cls(said["name"], base64.b64decode(said["base64"]), said["media_type"])


def check_names(files: Iterable[Attachment], where: str) -> None:
    """Raise EvalError if two files have one name, on systems that ignore case too."""
    seen: set[str] = set()
    for each in files:
        if each.name.lower() in seen:
            raise EvalError(f"it leaves two files named {each.name}", where=where, remedy="Give each its own name")
        seen.add(each.name.lower())
