"""A text cut into windows of tokens, and the tokens that a tokenizer puts first, such as BOS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optkit.common.files import object_if_any
from optkit.errors import SourceError
from optkit.source.texts import TextSource

Encode = Callable[[str], list[int]]
"""Text -> token ids, with the special tokens that the tokenizer itself adds."""
NEEDS_BOS = "gemma"
"""What the `model_type` of models holds whose predictions are far worse behind a first token other
than BOS.

Measured on a Gemma 3 of 270M: a loss of 4.45 nats on WikiText-2's second window without BOS, 3.25
with it."""


@dataclass(frozen=True)
class Stream:
    """A text as tokens, of which windows are cut."""

    lead: tuple[int, ...]
    """What stands before the tokens of each window."""
    body: list[int]
    where: str

    def room(self, length: int) -> int:
        """Return the tokens of text in a window of `length` tokens; raises SourceError for none."""
        if len(self.lead) >= length:
            raise SourceError(
                f"{len(self.lead)} tokens before the text fill the window of {length}",
                where=self.where,
                remedy="Raise it",
            )
        return length - len(self.lead)

    def window(self, start: int, length: int) -> list[int]:
        """Return the window of `length` tokens whose text begins at `start`."""
        return [*self.lead, *self.body[start : start + self.room(length)]]

    def count(self, length: int) -> int:
        """Return how many whole windows of `length` tokens there are, one behind the other."""
        return len(self.body) // self.room(length)


class CutText(TextSource):
    """A text that is cut into windows of tokens."""

    bos: Literal["tokenizer", "window", "text", "none"] = "tokenizer"
    """Where BOS stands, or whatever the tokenizer puts before a text. `tokenizer`: at the start of
    each window if the tokenizer puts it before a text, else nowhere. `window`: at the start of
    each window in any case. `text`: once, before the text. `none`: nowhere."""

    def stream(self, encode: Encode, text: str, bos_token: int | None) -> Stream:
        """Return the tokens of a text.
        `bos_token` is used if `bos` asks for one that the tokenizer does not add. Raises
        SourceError if there is none.
        """
        lead, body = apart(encode, text)
        return Stream(self.lead(lead, bos_token), [*lead, *body] if self.bos == "text" else body, self.where)

    def lead(self, added: list[int], bos_token: int | None) -> tuple[int, ...]:
        """Return what stands before each window if a tokenizer puts `added` before a text.
        Raises SourceError as `stream` does.
        """
        if self.bos in ("text", "none"):
            return ()
        if self.bos == "window" and not added:
            if bos_token is None:
                raise SourceError(
                    "bos is `window`, and the tokenizer has no such token",
                    where=self.where,
                    remedy="Set bos to tokenizer or none",
                )
            return (bos_token,)
        return tuple(added)


def apart(encode: Encode, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before a text, and those of the text.
    What it puts behind the text is left out.
    """
    special, ids = encode(""), encode(text)
    lead = 0
    while lead < min(len(special), len(ids)) and special[lead] == ids[lead]:
        lead += 1
    tail = len(special) - lead
    if tail and ids[-tail:] == special[lead:]:
        ids = ids[:-tail]
    return ids[:lead], ids[lead:]


def encoder(tokenizer: Any) -> Encode:
    """Return what encodes with a tokenizer of transformers."""
    return lambda text: list(tokenizer(text, verbose=False).input_ids)


def family_that_needs_bos(directory: Path) -> str:
    """Return the `model_type` of a model whose windows have to begin with BOS; empty for others."""
    kind = object_if_any(directory / "config.json").get("model_type")
    return kind if isinstance(kind, str) and NEEDS_BOS in kind else ""
