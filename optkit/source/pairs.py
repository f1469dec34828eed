"""Pairs of images and text: the records of a file or a hub data set as conversations."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.common.files import reading
from optkit.common.frozen import canonical_json
from optkit.errors import SourceError, needing
from optkit.source.text_files import bytes_in, read_objects, value_of

REPLACE = "Replace it, or take its record out of the data set"
IMAGE = {"type": "image"}


@dataclass(frozen=True)
class Picture:
    """An image as the bytes of its file."""

    name: str
    content: bytes

    def decoded(self) -> Any:
        """Return the image of Pillow, RGB and upright; raises SourceError if it cannot be read."""
        with needing("pillow", self.name, "optkit[vision]"):
            from PIL import Image, ImageOps
        with reading(self.name, "the image cannot be read", REPLACE):
            return ImageOps.exif_transpose(Image.open(io.BytesIO(self.content))).convert("RGB")


@dataclass(frozen=True)
class Pair:
    """A conversation about images."""

    where: str
    messages: tuple[dict[str, Any], ...]
    """Each with `role` and `content`, a list of `{"type": "text", "text": ...}` and `{"type":
    "image"}`, as chat templates take them.
    """
    pictures: tuple[Picture, ...]
    """One for each part that is an image, in their order."""

    @property
    def text(self) -> str:
        """All that is said."""
        parts = (part for message in self.messages for part in message["content"])
        return "\n".join(part["text"] for part in parts if "text" in part)

    @property
    def content(self) -> str:
        """Canonical JSON of what is said, and the digests of the images."""
        digests = [hashlib.sha256(picture.content).hexdigest() for picture in self.pictures]
        return canonical_json({"images": digests, "messages": self.messages})


def read_pairs(path: Path, text: str, images: str) -> Iterator[Pair]:
    """Yield the records of a file; paths of images count from its directory.
    `text` and `images` are fields: a text or a list of messages; an image, a list of them or null.

    Raises SourceError with the line for a record that is none, with the file for a missing image.
    """
    for where, record in read_objects(path, text, images):
        yield pair_of_row(record, text, images, where, path.parent)


def pair_of_row(row: dict[str, Any], text: str, images: str, where: str, folder: Path | None = None) -> Pair:
    """Return a record, whose images are `{"bytes": ..., "path": ...}`, or paths in a folder.
    Raises SourceError as `read_pairs` does.
    """
    listed = _listed(value_of(row, images, where, "images"))
    pictures = [_picture(each, images, where, folder) for each in listed]
    return _pair(where, value_of(row, text, where), pictures, text)


def _picture(value: Any, field: str, where: str, folder: Path | None) -> Picture:
    if (content := bytes_in(value)) is not None:
        return Picture(f"{where}: {value.get('path') or field}", content)
    if folder is None or not isinstance(value, str):
        raise SourceError(f"the field '{field}' is no image but {str(value)[:40]}", where=where)
    return _read(folder / Path(value).expanduser(), where)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read(file: Path, where: str) -> Picture:
    with reading(file, "the image cannot be read", f"It is named in {where}. {REPLACE}"):
        return Picture(str(file), file.read_bytes())


def _pair(where: str, said: Any, pictures: Sequence[Picture], field: str) -> Pair:
    places = [dict(IMAGE) for _ in pictures]
    if isinstance(said, str):
        answer = {"role": "assistant", "content": [{"type": "text", "text": said}]}
        return Pair(where, ({"role": "user", "content": places}, answer), tuple(pictures))
    messages = [_message(each, where, field) for each in (said if isinstance(said, list) and said else [said])]
    written = sum(part == IMAGE for message in messages for part in message["content"])
    asking = next((message for message in messages if message["role"] == "user"), messages[0])
    if not written:
        asking["content"] = [*places, *asking["content"]]
    elif written != len(pictures):
        what = f"its messages have {written} places for images, and {len(pictures)} images are named"
        raise SourceError(what, where=where)
    return Pair(where, tuple(messages), tuple(pictures))


def _message(value: Any, where: str, field: str) -> dict[str, Any]:
    known = isinstance(value, dict) and isinstance(value.get("role"), str)
    content = value.get("content") if known else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(_is_part(part) for part in parts):
        raise SourceError(
            f"the field '{field}' is neither a text nor a list of messages: {str(value)[:60]}",
            where=where,
            why="A message has a `role`, and as `content` a text or parts of type text and image",
        )
    return {"role": value["role"], "content": [_kept(part) for part in parts]}


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))


def _kept(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part without what rows of tables add, such as a text that is null."""
    return dict(IMAGE) if part["type"] == "image" else {"type": "text", "text": part["text"]}
