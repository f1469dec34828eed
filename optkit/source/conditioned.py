"""Pairs of an input and a target, which encoder-decoders are calibrated and measured on.

A line of a .jsonl file, or a row of a .parquet file or a hub data set, is a pair: {"input": "...",
"target": "..."}, or {"audio": "a.wav", "text": "..."} with a path that begins in the folder of the
file. Audio may also lie in the row: {"bytes": ..., "path": ...}.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import Field

from optkit.common.field_types import Name
from optkit.common.files import object_if_any, reading, sha256_of
from optkit.errors import SourceError
from optkit.model.task import ENCODER_DECODERS, PHRASES, task_of
from optkit.source.audio import SUFFIX
from optkit.source.cut_text import CutText
from optkit.source.text_files import RECORDS
from optkit.source.text_place import TextPlace
from optkit.source.texts import KNOWN, is_file_name

BETWEEN = "\x1f"
"""Stands between the parts of a pair in the document that it is, whose digest pins it."""


FEWEST = 2
"""Pairs; one would have no error bar."""


class Example(NamedTuple):
    """What the encoder is given, and what the decoder is to say."""

    source: str
    """A text, or the path of an audio file, or its bytes behind `INLINE`."""
    target: str


class ConditionedText(CutText):
    """A text that is cut into windows of tokens, or pairs of inputs and targets."""

    input: Name | None = Field(default=None, exclude_if=lambda given: given is None)
    """Of encoder-decoders: the field of a record that is the input, a text or the path of a WAV
    file or its bytes; `field` names the target, one sequence each.
    """

    def examples(self, data: Path | None) -> list[Example]:
        """Return the pairs of input and target in their order. Raises SourceError as `documents` does."""
        parts = (document.split(BETWEEN, 2) for document in self.documents(data))
        folder = Path(self.dataset).expanduser().absolute().parent
        return [Example(str(folder / source) if digest else source, target) for digest, source, target in parts]

    def first_examples(self, data: Path | None, wanted: int | None) -> list[Example]:
        """Return the first pairs, all if `wanted` is None; raises SourceError for too few."""
        found = self.examples(data)
        least = wanted or FEWEST
        if len(found) < least:
            what = f"there are {len(found):,} pairs and {least:,} are needed"
            raise SourceError(what, where=self.where, remedy="Ask for fewer, or take more pairs")
        return found[:wanted]

    def check_task(self, place: TextPlace) -> None:
        """Raise SourceError unless there are pairs for an encoder-decoder, and none for other models."""
        task = task_of(object_if_any(place.tokenizer / "config.json"))
        if task in ENCODER_DECODERS and self.input is None:
            raise SourceError(
                f"there is no `input`, and the model is {PHRASES[task]}",
                where=self.where,
                why="It predicts targets from inputs",
                remedy="Name a .jsonl file of pairs and its fields, e.g. {dataset: pairs.jsonl, input: input, "
                "field: target}",
            )
        if task and task not in ENCODER_DECODERS and self.input is not None:
            raise SourceError(
                f"`input` means nothing here: the model is {PHRASES[task]}", where=self.where, remedy="Leave it out"
            )

    def _read(self, data: Path | None) -> list[str]:
        targets = super()._read(data)
        if self.input is None:
            return targets
        if self.dataset in KNOWN or (is_file_name(self.dataset) and not self.dataset.endswith(RECORDS)):
            remedy = "Name a .jsonl or .parquet file, or a hub data set"
            raise SourceError("it has no pairs", where=self.where, remedy=remedy)
        given = {name: getattr(self, name) for name in ("dataset", "split", "revision")}
        named = _Inputs(**given, field=self.input)
        folder = Path(self.dataset).expanduser().absolute().parent
        return [
            BETWEEN.join((_digest_of(folder / source), source, target))
            for source, target in zip(named._read(data), targets, strict=True)
        ]


class _Inputs(CutText):
    of_files: ClassVar[bool] = True


def _digest_of(source: Path) -> str:
    """Return the digest of an audio file; empty for a text."""
    if source.suffix != SUFFIX:
        return ""
    with reading(source, "the audio file cannot be read", "Its path begins in the folder of the .jsonl file"):
        return sha256_of(source)
