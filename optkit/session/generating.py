"""What the sessions of causal language models share.
They have a tokenizer, greedy generation from a stream of tokens, and a limit of positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from optkit.errors import EvalError, OptkitError
from optkit.source.calibration import load_tokenizer
from optkit.stage import Opening

NO_POSITIONS = 1 << 31
Opened = TypeVar("Opened")


class Steps(Protocol):
    """The decode steps of one request; on a GPU they are queued."""

    def prompt(self, tokens: Tensor) -> Tensor:
        """int64 [batch, prompt] -> the tokens behind it, int64 [batch]."""

    def next(self) -> Tensor:
        """Return the tokens behind those returned last, int64 [batch]."""


class Decoder(Protocol):
    """Computes the greedy decode steps of an opened model, faster than the model itself."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What it left to the model so far."""

    def steps(self, batch: int, length: int) -> AbstractContextManager[Steps]:
        """Lend what a request of `batch` sequences of `length` tokens, prompts included, needs."""


def when_done(queued: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield tokens when their GPU has them; those behind them are queued by then."""
    tokens = next(queued, None)
    while tokens is not None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(tokens.device))
        behind = next(queued, None)
        done.synchronize()
        yield tokens
        tokens = behind


class TextSession(ABC):
    """An opened model of text, without what runs it.
    Who inherits it sets `vocabulary` and `positions`.
    """

    vocabulary: int
    positions: int
    hidden_memory = ""

    def __init__(self, opening: Opening) -> None:
        self.directory, self.device = opening.directory, opening.device
        self.trust_remote_code = opening.trust_remote_code

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the directory; raises SourceError if there is none."""
        return load_tokenizer(self.directory, self.trust_remote_code)

    def _in_use(self, opened: Opened | None) -> Opened:
        """Return what `close` takes away; raises OptkitError if it did."""
        if opened is None:
            raise OptkitError("the session was closed", where=str(self.directory), remedy="Open it again")
        return opened

    def _check_count(self, tokens: int, remedy: str) -> None:
        """Raise EvalError for more tokens than positions."""
        if tokens > self.positions:
            raise EvalError(
                f"{tokens:,} tokens are more than the model's {self.positions:,} positions",
                where=str(self.directory),
                remedy=remedy,
            )


class GeneratingSession(TextSession):
    """An opened model that generates, without what runs it."""

    def encode(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)

    def generate(self, tokens: Tensor, new_tokens: int) -> Tensor:
        steps = list(self.stream(tokens, new_tokens))
        return torch.cat([tokens.to(self.device), *(step.to(self.device).unsqueeze(1) for step in steps)], dim=1)

    @abstractmethod
    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Yield `new_tokens` greedy tokens, int64 [batch], each when the device has finished it.
        All prompts are of one length.

        Raises EvalError for more tokens than positions, ResourceError without memory.
        """

    def _check_length(self, tokens: Tensor, new_tokens: int) -> None:
        """Raise EvalError if a prompt, int64 [batch, prompt], and its answer exceed the positions."""
        self._check_count(tokens.shape[1] + new_tokens, "Use a shorter window or prompt")
