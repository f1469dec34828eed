"""Texts to train on: all of a text as one run of tokens, documents apart."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from optkit.source.calibration import holds_documents
from optkit.source.texts import KNOWN, TextSource


class TrainingText(TextSource):
    """A text to train on. In YAML a bare name is the data set: `texts: [c4]`."""

    default_splits: ClassVar[Mapping[str, str]] = dict.fromkeys(KNOWN, "train")
    default_hub_split: ClassVar[str] = "train"

    packing: Literal["auto", "documents", "joined"] = "auto"
    """`documents`: one document after the other, each ended by the tokenizer's end-of-text token. `joined`: the text runs on.
    `auto`: documents where a record is a document (c4, .jsonl, hub), joined where the text runs on."""

    @property
    def packs_documents(self) -> bool:
        """Whether a record is a document of its own."""
        return holds_documents(self.dataset) if self.packing == "auto" else self.packing == "documents"

    def token_ids(self, tokenizer: Any, data: Path | None) -> list[int]:
        """Return all tokens of the text in their order, with the special tokens that the tokenizer itself adds."""
        if not self.packs_documents:
            return list(tokenizer(self.joined(data), verbose=False).input_ids)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        documents = [document for document in self.documents(data) if document.strip()]
        return list(chain.from_iterable([*ids, *end] for ids in tokenizer(documents, verbose=False).input_ids))
