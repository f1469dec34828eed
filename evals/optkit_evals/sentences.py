"""The sentences that an encoder is measured on, taken from all over a text."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from optkit.common.field_types import BatchSize
from optkit.errors import EvalError
from optkit.measure import EncoderSession, EvalContext
from optkit.source.text_place import TextPlace
from optkit.source.texts import TextSource
from optkit.source.token_counts import TokenCounts
from optkit.source.training_text import TrainingText
from optkit_evals.windows import MOST_CHECKED, named, refuse_calibrated

if TYPE_CHECKING:
    from torch import Tensor

PARAGRAPH = re.compile(r"\n\s*\n")
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
"""Where one sentence ends and the next begins."""
FEWEST_WORDS, MOST_WORDS = 5, 60
"""A heading is shorter, a table or a piece of code that was taken for a sentence is longer."""


@dataclass(frozen=True)
class Sentences:
    """What is measured on, as batches of about equal lengths."""

    batches: tuple[tuple[Tensor, Tensor], ...]
    """Token ids and mask, int64 [sentences, tokens of the longest]."""
    protocol: str
    """Data set, split, revision, how sentences were taken and a digest of them and of their tokens."""


class SentenceText(TextSource):
    """A text and how many of its sentences are taken."""

    sentences: int = Field(default=256, ge=12, le=1_000_000)
    """Sentences to measure on, evenly from all over the text."""
    batch: BatchSize = 8
    """Sentences that are encoded together, those of like lengths; the shorter ones are padded."""

    def check_texts(self, place: TextPlace) -> None:
        """Refuse a tokenizer that cannot be opened or is another model's, and too few sentences."""
        counts = TokenCounts.of(place)
        if self.is_local(place.data):
            self._taken(split_sentences(self.documents(place.data)))
        text = TrainingText.model_validate({**self.identity(), "field": self.field, "packing": "joined"})
        counts.check_ids(text, MOST_CHECKED, place.vocabulary)

    def _taken(self, found: list[str]) -> list[str]:
        """Return the sentences measured on, short ones first; raises EvalError for too few."""
        if len(found) < self.sentences:
            what = f"the text has {len(found):,} different sentences and {self.sentences:,} are asked for"
            why = f"Counted are those of {FEWEST_WORDS} to {MOST_WORDS} words that end in a full stop, ! or ?"
            raise EvalError(what, where=self.where, why=why, remedy="Lower sentences, or take a longer text")
        taken = (found[index * len(found) // self.sentences] for index in range(self.sentences))
        return sorted(taken, key=lambda each: (len(each), each))

    def batched(self, session: EncoderSession, context: EvalContext) -> Sentences:
        """Return the sentences as tokens.
        Raises EvalError if the text was calibrated on, or has too few.
        """
        text = self if self.revision else self.pinned(context.data)
        taken = self._taken(split_sentences(text.documents(context.data)))
        refuse_calibrated(text, taken, context)
        batches = tuple(
            session.tokenize(taken[start : start + self.batch]) for start in range(0, len(taken), self.batch)
        )
        ids = hashlib.sha256("\n".join(taken).encode())
        for tokens, _ in batches:
            ids.update(tokens.numpy().tobytes())
        return Sentences(
            batches,
            f"{named(text)}, {self.sentences} different sentences of {FEWEST_WORDS} to {MOST_WORDS} words evenly"
            f" from all over it, in padded batches of {self.batch}, sentences and token ids {ids.hexdigest()[:12]}",
        )


def split_sentences(documents: list[str]) -> list[str]:
    """Return the different sentences of documents, in their order, white space made one space."""
    paragraphs = (paragraph for document in documents for paragraph in PARAGRAPH.split(document))
    sentences = (" ".join(sentence.split()) for paragraph in paragraphs for sentence in END.split(paragraph))
    fitting = (
        each for each in sentences if each.endswith((".", "!", "?")) and FEWEST_WORDS <= len(each.split()) <= MOST_WORDS
    )
    return list(dict.fromkeys(fitting))
