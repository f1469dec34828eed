"""Token windows to calibrate on, cut from a text so that a recipe always gives the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from optkit.common.field_types import Count, SequenceLength
from optkit.errors import SourceError
from optkit.source.conditioned import ConditionedText
from optkit.source.cut_text import encoder
from optkit.source.images import ImageText, Prompts
from optkit.source.texts import KNOWN
from optkit.source.tokenizer import load_tokenizer as load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.source.examples import ConditionedPrompts


class Calibration(ImageText, ConditionedText):
    """A text cut into `samples` windows of `sequence_length` tokens, or as many prompts with images, or
    pairs of inputs and targets.
    """

    default_splits: ClassVar[Mapping[str, str]] = dict.fromkeys(KNOWN, "train")
    default_hub_split: ClassVar[str] = "train"

    samples: Count = 128
    """Number of windows, of prompts with images, or of pairs."""
    sequence_length: SequenceLength = 512
    """Tokens of a window; of a prompt with images the most that it may have, of pairs the most that is
    read of an input and of a target.
    """
    packing: Literal["auto", "documents", "joined"] = "auto"
    """`documents`: the start of the first documents that are long enough. `joined`: windows spread
    evenly over the joined text. `auto`: documents if a record is a document (c4, .jsonl, hub),
    joined if the text runs on."""

    experts: Literal["routed", "all"] = Field(default="routed", exclude_if=lambda value: value == "routed")
    """Which tokens each expert of a mixture is calibrated on. `routed`: those that the router sends to
    it. `all`: every token; rare experts then see enough, and more time is taken."""

    @property
    def packs_documents(self) -> bool:
        """Whether a window is the start of a document."""
        return holds_documents(self.dataset) if self.packing == "auto" else self.packing == "documents"

    def unread_by(self, who: str, stage: object = None) -> str:
        """Return what a stage, or a library in its place, would ignore, and why; empty if nothing."""
        if self.images is not None and not getattr(stage, "sees_images", False):
            return f"images: {who} reads text alone"
        unseen = self.experts == "all" and not getattr(stage, "shows_experts", False)
        return f"experts: {who} shows an expert only what the router sends to it" if unseen else ""

    @property
    def size(self) -> tuple[int, int]:
        """Windows, and tokens of each."""
        return self.samples, self.sequence_length

    @property
    def limit(self) -> tuple[str, int]:
        """The field that limits the tokens of a prompt, and its number."""
        return "sequence_length", self.sequence_length

    def inputs(
        self, directory: Path, data: Path | None, trust_remote_code: bool = False
    ) -> Tensor | Prompts | ConditionedPrompts:
        """Return what the model reads: `tokens`, prompts with images, or pairs; raises as they do."""
        if self.input is not None:
            from optkit.source.examples import ConditionedPrompts, ExampleReader

            reader = ExampleReader(directory, trust_remote_code)
            return ConditionedPrompts(self.first_examples(data, self.samples), reader, self.sequence_length)
        if self.images is None:
            return self.tokens(directory, data, trust_remote_code)
        return self.prompts_of(directory, data, trust_remote_code, self.samples, self.limit)

    def tokens(self, tokenizer_directory: Path, data: Path | None, trust_remote_code: bool = False) -> Tensor:
        """Return the windows, int64 [samples, sequence_length], with special tokens as `bos` says.

        Raises SourceError if the text is too short for them.
        """
        import torch

        return torch.tensor(self.windows(tokenizer_directory, data, trust_remote_code), dtype=torch.int64)

    def windows(self, tokenizer_directory: Path, data: Path | None, trust_remote_code: bool = False) -> list[list[int]]:
        """Return what `tokens` does, without torch. Raises SourceError as it does."""
        if field := next((name for name in ("images", "input") if getattr(self, name) is not None), ""):
            what = "text alone is read here"
            raise SourceError(what, where=f"{self.where} with {field}", remedy=f"Leave out `{field}`")
        tokenizer = load_tokenizer(tokenizer_directory, trust_remote_code)
        return self._documents(tokenizer, data) if self.packs_documents else self._joined(tokenizer, data)

    def passages(self, tokenizer_directory: Path, data: Path | None, trust_remote_code: bool = False) -> list[str]:
        """Return the text of the windows or prompts. Raises SourceError as `inputs` does."""
        if self.images is not None:
            return [pair.text for pair in self.pairs(data, self.samples)]
        if self.input is not None:
            return [example.target for example in self.first_examples(data, self.samples)]
        tokenizer = load_tokenizer(tokenizer_directory, trust_remote_code)
        windows = self.tokens(tokenizer_directory, data, trust_remote_code).tolist()
        return [str(text) for text in tokenizer.batch_decode(windows, skip_special_tokens=True)]

    def _documents(self, tokenizer: Any, data: Path | None) -> list[list[int]]:
        documents = self.documents(data)
        windows: list[list[int]] = []
        longest = 0
        for document in documents:
            stream = self.stream(encoder(tokenizer), document, tokenizer.bos_token_id)
            longest = max(longest, len(stream.lead) + len(stream.body))
            if stream.count(self.sequence_length):
                windows.append(stream.window(0, self.sequence_length))
            if len(windows) == self.samples:
                return windows
        raise SourceError(
            f"{len(windows):,} of {len(documents):,} documents have {self.sequence_length} tokens "
            f"and {self.samples:,} are needed",
            where=self.where,
            why=f"The longest has {longest:,}",
            remedy="Lower `samples` or `sequence_length`, or set `packing: joined`",
        )

    def _joined(self, tokenizer: Any, data: Path | None) -> list[list[int]]:
        stream = self.stream(encoder(tokenizer), self.joined(data), tokenizer.bos_token_id)
        available, room = stream.count(self.sequence_length), stream.room(self.sequence_length)
        if available < self.samples:
            raise SourceError(
                f"the text has {len(stream.body):,} tokens and {self.samples:,} x {room:,} = "
                f"{self.samples * room:,} are needed",
                where=self.where,
                remedy=f"Lower `samples` to {available:,}, or `sequence_length`"
                if available
                else "Lower `sequence_length`",
            )
        starts = (index * available // self.samples * room for index in range(self.samples))
        return [stream.window(start, self.sequence_length) for start in starts]


def holds_documents(dataset: str) -> bool:
    """Say whether a record of a data set is a document of its own; else its text runs on."""
    return dataset not in ("python-reference", "wikitext2") and not dataset.endswith(".txt")
