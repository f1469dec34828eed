"""A session that needs no transformers: a bigram model whose logits are rows of a table, with
characters as tokens.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor


class BigramSession:
    def __init__(
        self, *, vocabulary: int = 32, positions: int = 64, seed: int = 0, before: str = "", after: str = ""
    ) -> None:
        self.directory = Path("bigram")
        self.device = "cpu"
        self.vocabulary = vocabulary
        self.positions = positions
        self.notes: tuple[str, ...] = ()
        self.hidden_memory = ""
        self.trust_remote_code = False
        self.table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))
        self.before, self.after = before, after
        self.on_token: Callable[[int, int], None] = lambda batch, index: None

    def encode(self, text: str) -> Tensor:
        return torch.tensor(
            [ord(letter) % self.vocabulary for letter in self.before + text + self.after], dtype=torch.int64
        )

    def logits(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def generate(self, tokens: Tensor, new_tokens: int) -> Tensor:
        return torch.cat([tokens, *(token[:, None] for token in self.stream(tokens, new_tokens))], dim=1)

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        last = tokens[:, -1]
        for index in range(new_tokens):
            last = self.table[last].argmax(-1)
            self.on_token(len(tokens), index)
            yield last

    def decode_bytes(self, batch: int, context: int) -> int:
        return 1000 + batch * context

    def close(self) -> None:
        pass


class Said:
    """A progress that remembers its warnings."""

    def __init__(self) -> None:
        from optkit.progress import SilentProgress

        self.warnings: list[str] = []
        self.task = SilentProgress().task

    def say(self, line: str) -> None:
        pass

    def warn(self, line: str) -> None:
        self.warnings.append(line)
