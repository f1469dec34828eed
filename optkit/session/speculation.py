"""Greedy decoding with proposals.
The model checks several tokens in one forward pass and keeps those that it would have chosen.

    known      t0 t1 t2 t3          cached: t0 t1 t2
    step       t3 p1 p2 p3          the last token that is not in the cache, and what is proposed to follow it
    chosen     c1 c2 c3 c4          the model's choice after each of them
    kept       c1 c2 c3             if p1 = c1, p2 = c2 and p3 != c3: c3 is the model's own choice after
                                    what it agreed with
    cache      t0 t1 t2 t3 p1 p2    p3 is taken out again

Of a batch, the row that agrees least decides how many are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from optkit.errors import StageError
from optkit.kernels.kv_cache import CodedLayer
from optkit.model.carried_state import CarriedState, check_keys_and_values


@dataclass
class Speculation:
    """What was proposed and kept since it was last reset; a token of a batch counts once."""

    proposed: int = 0
    accepted: int = 0
    forwards: int = 0
    """Of the model, after the prompt."""
    tokens: int = 0
    """Generated after the prompt's own, by these forwards."""

    def reset(self) -> None:
        """Begin anew."""
        self.proposed = self.accepted = self.forwards = self.tokens = 0


class Proposer(Protocol):
    """Something that guesses what comes next."""

    def start(self, state: CarriedState) -> None:
        """Forget the last text; `state` is what the model keeps of the next one."""

    def propose(self, known: Tensor, count: int) -> Tensor:
        """int64 [batch, known] -> int64 [batch, at most count], what may follow."""

    def read_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes read to propose a token for `batch` rows of `context` tokens."""


class PromptLookup:
    """Proposes what followed the last tokens at an earlier place.
    The longest and latest match comes first.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def start(self, state: CarriedState) -> None:
        """Nothing is kept."""

    def read_bytes(self, batch: int, context: int) -> int:
        """Return 0: there are no weights."""
        return 0

    def propose(self, known: Tensor, count: int) -> Tensor:
        """int64 [batch, known] -> int64 [batch, at most count].
        None are proposed if no row finds any.
        """
        found = [self._after_match(row, count) for row in known.tolist()]
        width = max(map(len, found))
        padded = [row + [0] * (width - len(row)) for row in found]
        return torch.tensor(padded, dtype=torch.int64, device=known.device).reshape(len(found), width)

    def _after_match(self, row: list[int], count: int) -> list[int]:
        for size in range(min(self.longest, len(row) - 1), 0, -1):
            last = row[-size:]
            for start in range(len(row) - size - 1, -1, -1):
                if row[start : start + size] == last:
                    return row[start + size : start + size + count]
        return []


class DraftModel:
    """Proposes what another model would choose."""

    def __init__(
        self, step: Step, new_state: Callable[[], CarriedState], read_bytes: Callable[[int, int], int]
    ) -> None:
        """Take what computes logits, what makes an empty state, and what one step reads.
        The logits are of tokens that follow those in a state.
        """
        self._step, self._new_state, self.read_bytes = step, new_state, read_bytes
        self._state, self._length = new_state(), 0

    def start(self, state: CarriedState) -> None:
        """Forget the last text."""
        self._state, self._length = self._new_state(), 0

    def propose(self, known: Tensor, count: int) -> Tensor:
        """int64 [batch, known] -> int64 [batch, count]."""
        self._forget(known.shape[1] - 1)
        step, found = known[:, self._length :], []
        for _ in range(count):
            logits = self._step(step, self._state, last=True)
            self._length += step.shape[1]
            step = logits[:, -1:].argmax(-1)
            found.append(step)
        return torch.cat(found, dim=1)

    def _forget(self, length: int) -> None:
        """Take tokens out of the cache that the model did not keep."""
        if self._length > length:
            self._state.crop(self._length - length)
            self._length = length


def check_speculates(state: CarriedState, compiled: bool) -> None:
    """Raise StageError for a compiled model, and for one that cannot forget its last tokens."""
    if compiled:
        raise StageError(
            "a compiled step cannot check several tokens",
            where="speculative",
            why="It was compiled for one token at a time and a cache as long as the request",
            remedy="Take compile or speculative out of the recipe",
        )
    check_keys_and_values(state.model, "speculative")
    others = sorted({type(layer).__name__ for layer in state.layers if not _forgets(layer)})
    if others:
        raise StageError(
            f"the KV cache has layers of another kind: {', '.join(others)}",
            where="speculative",
            why="Tokens that were proposed in vain have to be taken out again, and these layers "
            "have overwritten others",
            remedy="Take it out for this architecture",
        )


def _forgets(layer: object) -> bool:
    return type(layer) is DynamicLayer or (type(layer) is CodedLayer and layer.sliding_window is None)


class Step(Protocol):
    """Computes logits [batch, new, vocabulary] of tokens [batch, new] that follow those in a state.
    Of the last one alone if `last`.
    """

    def __call__(self, tokens: Tensor, state: CarriedState, *, last: bool = False) -> Tensor: ...


def speculate(
    step: Step, state: CarriedState, tokens: Tensor, new_tokens: int, proposer: Proposer, most: int, counts: Speculation
) -> Iterator[Tensor]:
    """Yield the `new_tokens` greedy tokens after a prompt, int64 [batch, prompt] -> int64 [batch].
    Each comes when the device has finished it.

    At most `most` tokens are proposed at once; what became of them is added to `counts`.
    """
    if not new_tokens:
        return
    proposer.start(state)
    known = torch.cat([tokens, step(tokens, state, last=True)[:, -1:].argmax(-1)], dim=1)
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    yield known[:, -1]
    left = new_tokens - 1
    while left:
        proposed = proposer.propose(known, min(most, left - 1)) if left > 1 else known[:, :0]
        chosen = step(torch.cat([known[:, -1:], proposed], dim=1), state).argmax(-1)
        width = proposed.shape[1]
        kept = int((chosen[:, :width] == proposed).cumprod(1).amin(0).sum())
        state.crop(width - kept)
        counts.proposed += width
        counts.accepted += kept
        counts.forwards += 1
        counts.tokens += kept + 1
        left -= kept + 1
        known = torch.cat([known, chosen[:, : kept + 1]], dim=1)
        yield from chosen[:, : kept + 1].unbind(1)
