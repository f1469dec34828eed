"""What the sessions of encoders share: a tokenizer that pads, limits, and embeddings from features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optkit.errors import EvalError
from optkit.model.pooling import longest_text, pooling_for
from optkit.model.task import Task
from optkit.session.generating import NO_POSITIONS, TextSession
from optkit.stage import Opening


class Encoder(TextSession):
    """An opened encoder of text, without what runs it.
    It implements `optkit.measure.EncoderSession` with `outputs` and `close`.
    """

    def __init__(self, opening: Opening, task: Task, positions: int | None, vocabulary: int) -> None:
        """Of an encoder with a head there are labels and no embeddings, so it does not pool."""
        super().__init__(opening)
        self.positions, self.vocabulary = positions or NO_POSITIONS, vocabulary
        self._pooling = pooling_for(self.directory, task)

    @property
    def pooling(self) -> str:
        """How features become an embedding, e.g. `mean of the tokens, normalised`.
        It is empty if they do not.
        """
        return str(self._pooling) if self._pooling else ""

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask, int64 [texts, tokens of the longest].
        A text is cut as sentence-transformers cuts it.
        """
        longest = min(self.positions, longest_text(self.directory) or self.positions, self.tokenizer.model_max_length)
        rows: list[list[int]] = self.tokenizer(list(texts), truncation=True, max_length=longest, verbose=False)[
            "input_ids"
        ]
        padding = self.tokenizer.pad_token_id or 0
        tokens = torch.full((len(rows), max(map(len, rows))), padding, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        return tokens, mask

    def _pool(self, features: Any, mask: Any) -> Any:
        if self._pooling is None:
            raise EvalError(
                "it gives labels and no features",
                where=str(self.directory),
                why="Its architecture has a head behind the encoder",
            )
        return self._pooling(features, mask)

    def _pooling_notes(self) -> list[str]:
        if self._pooling is None:
            return []
        said = "as its modules.json says" if self._pooling.stated else "there is no modules.json that says another"
        return [f"embeddings: {self._pooling} ({said})"]

    def _check(self, tokens: Tensor) -> None:
        self._check_count(tokens.shape[1], "Use shorter sequences")
