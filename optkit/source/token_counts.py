"""How many tokens texts have, as far as plans have to know it.
They are counted with the library `tokenizers` alone, and remembered.

Counting stops when there are enough. If there seem to be too few, all are counted as the
training will, which loads transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from optkit.common.atomic import remember
from optkit.common.files import object_if_any, reading, sha256_of
from optkit.common.frozen import digest
from optkit.errors import SourceError
from optkit.source.calibration import Calibration, load_tokenizer
from optkit.source.text_place import TextPlace
from optkit.source.training_text import TrainingText

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
PIECE_CHARACTERS = 1 << 16
"""A text that runs on is cut into such pieces to be counted; a cut makes a token or two more."""
PIECES_AT_ONCE = 16
DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class _Count:
    """What is known of a text."""

    tokens: int
    largest: int
    """The largest id of a token."""
    whole: bool
    """All of it was counted."""
    exact: bool
    """As the training counts."""
    lead: int = 0
    """Tokens before each sequence that are not of the text."""


@dataclass(frozen=True)
class TokenCounts:
    """Counts the tokens of texts that are on this machine."""

    directory: Path
    """With the tokenizer."""
    data: Path | None
    cache: Path
    """Directory, perhaps not there yet, of what was counted before."""
    trust_remote_code: bool = False

    @classmethod
    def of(cls, place: TextPlace) -> Self:
        """Return what counts at a place. Raises SourceError if the tokenizer there cannot be
        opened.
        """
        if place.transformers or not (place.tokenizer / TOKENIZER).is_file():
            load_tokenizer(place.tokenizer, place.trust_remote_code)
        return cls(place.tokenizer, place.data, place.counts, place.trust_remote_code)

    def check_ids(self, text: TrainingText, tokens: int, vocabulary: int | None) -> None:
        """Raise SourceError if the first `tokens` tokens of a text have an id beyond the model's."""
        if vocabulary is None or not text.is_local(self.data) or not (self.directory / TOKENIZER).is_file():
            return
        largest = self._count(text, tokens).largest
        if largest >= vocabulary:
            raise SourceError(
                f"the tokenizer makes token {largest:,} of {text.where}, and the model's vocabulary "
                f"ends at {vocabulary - 1:,}",
                where=str(self.directory / TOKENIZER),
                why="It belongs to another model",
                remedy="Copy the tokenizer files of the model itself",
            )

    def enough_sequences(self, texts: tuple[TrainingText, ...], length: int, wanted: int) -> int | None:
        """Return at least `wanted` if the texts give so many sequences of `length` tokens.
        Else return exactly how many they give.

        None if that cannot be said before the training: a text lies on the hub, or there is no
        tokenizer.json.
        """
        local = [text for text in texts if text.is_local(self.data)]
        if not (self.directory / TOKENIZER).is_file():
            return None
        found = 0
        for text in local:
            found += self._count(text, (wanted - found) * length).tokens // length
            if found >= wanted:
                return found
        return sum(self._sequences(text, length) for text in texts) if len(local) == len(texts) else None

    def check_calibration(self, text: Calibration, positions: int | None) -> None:
        """Raise SourceError for windows longer than the model was built for.
        The same goes for a text on this machine that is too short for them.
        """
        if positions and text.sequence_length > positions:
            raise SourceError(
                f"sequences of {text.sequence_length:,} tokens, and the model was built for {positions:,}",
                where=f"calibration on {text.where}",
                remedy=f"Use a sequence_length of at most {positions:,}",
            )
        if not text.is_local(self.data) or not (self.directory / TOKENIZER).is_file() or self._seems_enough(text):
            return
        text.windows(self.directory, self.data, self.trust_remote_code)

    def _seems_enough(self, text: Calibration) -> bool:
        if not text.packs_documents:
            named = {**text.identity(), "field": text.field, "packing": "joined", "bos": text.bos}
            wanted = text.samples * text.sequence_length
            return self._count(TrainingText.model_validate(named), wanted).tokens >= wanted
        tokenizer, documents, found = self._tokenizer(), text.documents(self.data), 0
        for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
            some = tokenizer.encode_batch_fast(documents[start : start + DOCUMENTS_AT_ONCE])
            found += sum(len(each) >= text.sequence_length for each in some)
            if found >= text.samples:
                return True
        return False

    def _count(self, text: TrainingText, wanted: int) -> _Count:
        """Count the tokens of a text until there are `wanted`."""
        known = self._known(text)
        if known and (known.whole or known.tokens >= wanted):
            return known
        tokens = largest = 0
        for some, top in self._pieces(text):
            tokens, largest = tokens + some, max(largest, top)
            if tokens >= wanted:
                return self._keep(text, _Count(tokens, largest, whole=False, exact=False))
        return self._keep(text, _Count(tokens, largest, whole=True, exact=False))

    def _sequences(self, text: TrainingText, length: int) -> int:
        """Return how many sequences of `length` tokens the training will find."""
        known = self._known(text)
        if not (known and known.exact):
            found = text.tokens(load_tokenizer(self.directory, self.trust_remote_code), self.data)
            largest = max((*found.lead, *found.body), default=0)
            known = self._keep(text, _Count(len(found.body), largest, whole=True, exact=True, lead=len(found.lead)))
        return known.tokens // max(1, length - known.lead)

    def _pieces(self, text: TrainingText) -> Iterator[tuple[int, int]]:
        """Yield how many tokens each part of a text has, and the largest of their ids."""
        tokenizer = self._tokenizer()
        yield 0, max(tokenizer.encode("").ids, default=0)
        if text.packs_documents:
            parts, at_once = [document for document in text.documents(self.data) if document.strip()], DOCUMENTS_AT_ONCE
        else:
            whole, at_once = text.joined(self.data), PIECES_AT_ONCE
            parts = [whole[start : start + PIECE_CHARACTERS] for start in range(0, len(whole), PIECE_CHARACTERS)]
        ends = int(text.packs_documents and bool(self._config().get("eos_token")))
        for start in range(0, len(parts), at_once):
            some = tokenizer.encode_batch_fast(parts[start : start + at_once], add_special_tokens=text.packs_documents)
            yield sum(len(each) + ends for each in some), max((max(each.ids, default=0) for each in some), default=0)

    def _tokenizer(self) -> Any:
        """Return the tokenizer; raises SourceError if its file is damaged."""
        from tokenizers import Tokenizer

        path = self.directory / TOKENIZER
        with reading(path, "the tokenizer cannot be read", "Copy the file from the model's source again"):
            tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _config(self) -> dict[str, Any]:
        return object_if_any(self.directory / TOKENIZER_CONFIG)

    def _file(self, text: TrainingText) -> Path:
        tokenizer = {"file": sha256_of(self.directory / TOKENIZER), "config": self._config()}
        named = {"text": text.identity(), "field": text.field, "documents": text.packs_documents, "bos": text.bos}
        return self.cache / f"{digest(named | tokenizer)}.json"

    def _known(self, text: TrainingText) -> _Count | None:
        if not text.revision:
            return None
        # Only a memory: if it is damaged, the text is counted again.
        try:
            return _Count(**json.loads(self._file(text).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _keep(self, text: TrainingText, count: _Count) -> _Count:
        if text.revision:
            remember(self._file(text), json.dumps(asdict(count)))
        return count
