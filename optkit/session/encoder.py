"""What the sessions of encoders share: a tokenizer that pads, limits, and embeddings from features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.errors import EvalError
from optkit.model.pooling import Pooling, longest_text
from optkit.source.calibration import load_tokenizer

NO_POSITIONS = 1 << 31


class Encoder(ABC):
    """An opened encoder of text, without what runs it.
    It implements `optkit.measure.EncoderSession` with `outputs` and `close`.
    """

    def __init__(
        self,
        directory: Path,
        device: str,
        trust_remote_code: bool,
        pooling: Pooling | None,
        positions: int | None,
        vocabulary: int,
    ) -> None:
        """`pooling` is None for an encoder with a head, which gives labels and no embeddings."""
        self.directory, self.device = directory, device
        self.positions, self.vocabulary = positions or NO_POSITIONS, vocabulary
        self.hidden_memory = ""
        self._pooling, self._trust_remote_code = pooling, trust_remote_code

    @property
    def pooling(self) -> str:
        """How features become an embedding, e.g. `mean of the tokens, normalised`.
        It is empty if they do not.
        """
        return str(self._pooling) if self._pooling else ""

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the directory; raises SourceError if there is none."""
        return load_tokenizer(self.directory, self._trust_remote_code)

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

    @abstractmethod
    def outputs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 [batch, sequence] twice -> float32 on the CPU.
        They are features [batch, sequence, hidden], or logits.
        """

    @abstractmethod
    def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 [batch, sequence] twice -> pooled features, float32 [batch, hidden], on the CPU."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; the session cannot be used afterwards."""

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
        if tokens.shape[1] > self.positions:
            raise EvalError(
                f"{tokens.shape[1]:,} tokens are more than the model's {self.positions:,} positions",
                where=str(self.directory),
                remedy="Use shorter sequences",
            )
