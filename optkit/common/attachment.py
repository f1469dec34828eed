"""A file that is left beside a scorecard: a picture, a table, whatever says more than its numbers."""

from __future__ import annotations

import base64
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
            raise EvalError(
                f"{self.name!r} is no name for a file beside a scorecard",
                where="attachment",
                why="It would lie elsewhere, or nowhere on some systems",
                remedy="Use letters, digits, dot, dash and underscore, 100 of them at most",
            )
        if not MEDIA_TYPE.fullmatch(self.media_type):
            raise EvalError(
                f"{self.media_type!r} is no media type", where=self.name, remedy="Name one such as image/svg+xml"
            )
        if not isinstance(self.content, bytes):
            kind = type(self.content).__name__
            raise EvalError(f"its content is {kind} and not bytes", where=self.name, remedy="Encode it as UTF-8")
        if len(self.content) > MOST_BYTES:
            raise EvalError(
                f"it has {size_text(len(self.content))}, and at most {size_text(MOST_BYTES)} are kept",
                where=self.name,
                remedy="Leave a smaller file",
            )

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
