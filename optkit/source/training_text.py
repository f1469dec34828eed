"""Texts to train on: all of a text as one run of tokens, documents apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from optkit.source.calibration import holds_documents
from optkit.source.cut_text import CutText, Stream, apart, encoder
from optkit.source.texts import KNOWN


class TrainingText(CutText):
    """A text to train on. In YAML a bare name is the data set: `texts: [c4]`."""

    default_splits: ClassVar[Mapping[str, str]] = dict.fromkeys(KNOWN, "train")
    default_hub_split: ClassVar[str] = "train"

    packing: Literal["auto", "documents", "joined"] = "auto"
    """`documents`: one document after the other, each ended by the tokenizer's end-of-text token.
    `joined`: the text runs on. `auto`: documents if a record is a document (c4, .jsonl, hub),
    joined if the text runs on."""

    @property
    def packs_documents(self) -> bool:
        """Whether a record is a document of its own."""
        return holds_documents(self.dataset) if self.packing == "auto" else self.packing == "documents"

    def tokens(self, tokenizer: Any, data: Path | None) -> Stream:
        """Return the tokens of the text in their order.
        Documents within have what the tokenizer puts before them, unless `bos` is none.

        Raises SourceError if `bos` asks for a token that the tokenizer does not have.
        """
        if not self.packs_documents:
            return self.stream(encoder(tokenizer), self.joined(data), tokenizer.bos_token_id)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        documents = [document for document in self.documents(data) if document.strip()]
        added = apart(encoder(tokenizer), "a")[0]
        lead = self.lead(added, tokenizer.bos_token_id)
        ids: list[int] = []
        for document in tokenizer(documents, verbose=False).input_ids:
            ids += [*(document[len(added) :] if self.bos == "none" else document), *end]
        return Stream(lead, ids[len(added) :] if lead and added else ids, self.where)
