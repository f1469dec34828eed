"""Texts as sequences of tokens: which are trained on in which order, and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from optkit.source.calibration import load_tokenizer
from optkit.source.training_text import TrainingText
from optkit.training.budget import Budget


@dataclass(frozen=True)
class TrainingData:
    """Sequences of equal length, cut one after the other from texts.
    None of the held-out ones is ever trained on.
    """

    tokens: Tensor
    """int64 [sequences, sequence_length], on the CPU."""
    places: tuple[str, ...]
    """Where each sequence comes from, e.g. `c4 (train), tokens 512 to 1,023`."""
    training: tuple[int, ...]
    """Rows of `tokens` to train on."""
    held_out: tuple[int, ...]
    """Rows of `tokens` to judge on."""
    seed: int = 0
    lead: int = 0
    """Tokens at the start of each sequence that are not of its text, such as BOS."""

    @property
    def sequence_length(self) -> int:
        return self.tokens.shape[1]

    def rows(self, start: int, count: int) -> list[int]:
        """Return the rows from number `start` on of the endless order.
        One epoch follows the other, each in an order drawn from the seed.
        """
        size = len(self.training)
        return [
            self.training[_order(size, self.seed, number // size)[number % size]]
            for number in range(start, start + count)
        ]

    def extended(self, tokens: Tensor, name: str) -> TrainingData:
        """Return this with further sequences to train on, int64 [more, sequence_length]."""
        more = tuple(range(len(self.tokens), len(self.tokens) + len(tokens)))
        places = tuple(f"{name}, sequence {number:,}" for number in range(len(tokens)))
        return replace(
            self, tokens=torch.cat([self.tokens, tokens]), places=self.places + places, training=self.training + more
        )

    def tokens_digest(self) -> str:
        """Return the SHA-256 of the tokens."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def digest(self) -> str:
        """Return the SHA-256 of tokens and rows."""
        rows = torch.tensor([*self.training, -1, *self.held_out, self.seed])
        return hashlib.sha256(self.tokens_digest().encode() + rows.numpy().tobytes()).hexdigest()


@lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    return tuple(torch.randperm(size, generator=generator).tolist())


def read_texts(
    texts: Sequence[TrainingText],
    tokenizer_directory: Path,
    sequence_length: int,
    held_out: int,
    data: Path | None,
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    where: str = "training",
) -> TrainingData:
    """Cut texts into sequences, and hold some of them out, evenly spread over all.
    The rest of each text is left out.

    Raises SourceError for a text that cannot be read, StageError if nothing would be left to
    train on.
    """
    tokenizer = load_tokenizer(tokenizer_directory, trust_remote_code)
    pieces: list[Tensor] = []
    places: list[str] = []
    leads: set[int] = set()
    for text in texts:
        stream = text.tokens(tokenizer, data)
        count, room = stream.count(sequence_length), stream.room(sequence_length)
        body = torch.tensor(stream.body[: count * room], dtype=torch.int64).view(count, room)
        pieces.append(torch.cat([torch.tensor(stream.lead, dtype=torch.int64).expand(count, -1), body], dim=1))
        places += [f"{text.where}, tokens {row * room:,} to {(row + 1) * room - 1:,}" for row in range(count)]
        leads.add(len(stream.lead))
    return replace(split(torch.cat(pieces), places, held_out, seed, where), lead=min(leads))


def split(tokens: Tensor, places: Sequence[str], held_out: int, seed: int, where: str) -> TrainingData:
    """Hold out `held_out` of int64 [sequences, sequence_length], evenly spread. Raises StageError
    if nothing would be left.
    """
    total, length = tokens.shape
    Budget(length, 1, held_out, where=where).refuse_nothing_left(total)
    judged = {(2 * index + 1) * total // (2 * held_out) for index in range(held_out)}
    training = tuple(row for row in range(total) if row not in judged)
    return TrainingData(tokens, tuple(places), training, tuple(sorted(judged)), seed)
