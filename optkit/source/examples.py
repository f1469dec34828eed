"""Pairs of an input and a target as an encoder-decoder takes them: tokens, or what it hears."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.common.files import object_if_any, reading
from optkit.errors import SourceError
from optkit.model.task import Task, positions_of, task_of
from optkit.source.audio import Ears
from optkit.source.conditioned import Example
from optkit.source.tokenizer import load_tokenizer

MOST_TOKENS = 1 << 20
"""Of an input, if nothing in config.json limits it."""
START = "decoder_start_token_id"


class ExampleReader:
    """The tokenizer, and for one that hears the feature extractor, of a model directory."""

    def __init__(self, directory: Path, trust_remote_code: bool = False) -> None:
        self.directory, self.trusted = directory, trust_remote_code

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; raises SourceError if there is none."""
        return load_tokenizer(self.directory, self.trusted)

    @cached_property
    def ears(self) -> Ears:
        """What makes features of audio."""
        return Ears(self.directory)

    @property
    def hears(self) -> bool:
        """Whether inputs are audio files, and not texts."""
        return task_of(self._config) is Task.SPEECH

    def source(self, source: str) -> dict[str, Tensor]:
        """Return what the encoder is given of a text or of the path of an audio file.
        A text is cut at the positions of the model.
        """
        if self.hears:
            return {"input_features": self.ears.heard(source)}
        longest = int(min(positions_of(self._config) or MOST_TOKENS, self.tokenizer.model_max_length))
        read = self.tokenizer(source, return_tensors="pt", truncation=True, max_length=longest, verbose=False)
        return {name: read[name] for name in ("input_ids", "attention_mask")}

    def target(self, text: str, longest: int) -> Tensor:
        """Return what the decoder is to say, int64 [tokens]: its start, then at most `longest - 1`."""
        ids: list[int] = self.tokenizer(text_target=text, verbose=False)["input_ids"]
        begun = [self.start, *(ids[1:] if ids[:1] == [self.start] else ids)]
        return torch.tensor(begun[:longest], dtype=torch.int64)

    @cached_property
    def start(self) -> int:
        """What the decoder begins with; raises SourceError if nothing says it."""
        generation = object_if_any(self.directory / "generation_config.json")
        found = next((each[START] for each in (generation, self._config) if each.get(START) is not None), None)
        if found is None:
            raise SourceError(
                f"there is no {START}",
                where=str(self.directory / "config.json"),
                why="What the decoder begins with is not known without it",
                remedy="Take config.json and generation_config.json from the model's source again",
            )
        return int(found)

    @cached_property
    def _config(self) -> dict[str, Any]:
        from transformers import AutoConfig

        with reading(self.directory / "config.json", "transformers cannot read it"):
            config = AutoConfig.from_pretrained(self.directory, trust_remote_code=self.trusted)
            return dict(config.to_dict())


@dataclass(frozen=True)
class ConditionedPrompts:
    """Pairs that a model is calibrated on, one by one, so that none is padded."""

    examples: Sequence[Example]
    reader: ExampleReader
    longest: int
    """The most tokens that an input or a target has; longer ones are cut."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.examples)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield what the model is called with, a batch of one."""
        for example in self.examples:
            given = self.reader.source(example.source)
            if not self.reader.hears:
                given = {name: value[:, : self.longest] for name, value in given.items()}
            yield {**given, "decoder_input_ids": self.reader.target(example.target, self.longest)[None]}

    def __getitem__(self, rows: slice) -> ConditionedPrompts:
        """Return some of them."""
        return replace(self, examples=self.examples[rows])
