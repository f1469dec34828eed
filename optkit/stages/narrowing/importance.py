"""How much each decoder block matters on a text.
That is what it does to the hidden states, or what the model loses without it.

One block is in memory at a time. Scores are of runs of blocks: run k is blocks k, k + 1, ... k +
length - 1 of those that are left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from optkit.algorithms.importance import block_influence
from optkit.model.blocks import BlockInputs
from optkit.model.depth import Refusal, losable
from optkit.model.head import logits_behind
from optkit.model.skeleton import Skeleton
from optkit.progress import Progress

Measure = Literal["block_influence", "perplexity"]
Search = Literal["at_once", "one_by_one", "contiguous"]


@dataclass
class Chosen:
    """Blocks to remove, and what they were chosen by."""

    removed: list[int]
    scores: list[float]
    """Block influence, or the perplexity without it, of each block of the whole model; of each run
    of blocks if they are contiguous.
    """
    perplexity: float | None = None
    """Of the whole model on the same text, if that was computed."""
    rounds: list[dict[str, float]] = field(default_factory=list)
    """If blocks went one by one: each round's block, counted as in the whole model, and its
    score.
    """


@dataclass
class BlockImportance:
    """Scores the blocks of a model on int64 [sequences, sequence_length]."""

    skeleton: Skeleton
    tokens: Tensor
    device: str
    batch_size: int
    positions_at_once: int
    """Positions whose logits are held together."""
    progress: Progress

    def choose(self, count: int, measure: Measure, search: Search, refuse: Refusal) -> Chosen:
        """Return the `count` blocks that matter least, of those that may go: `refuse` raises StageError for others."""
        score: Callable[[Sequence[int], int], list[float]] = (
            self.influences if measure == "block_influence" else self.perplexities
        )
        left = list(range(len(self.skeleton.blocks)))
        length = count if search == "contiguous" else 1
        scores = score(left, length)
        whole = self._whole
        if search == "contiguous":
            (start,) = losable(_ranked(scores), 1, lambda starts: refuse(range(starts[-1], starts[-1] + count)))
            return Chosen(left[start : start + count], scores, whole)
        if search == "at_once":
            return Chosen(sorted(losable(_ranked(scores), count, refuse)), scores, whole)
        chosen, now = Chosen([], scores, whole), scores
        while True:
            (block,) = losable((left[place] for place in _ranked(now)), 1, refuse, chosen.removed)
            chosen.rounds.append({"block": block, "score": now[left.index(block)]})
            chosen.removed.append(block)
            left.remove(block)
            if len(chosen.removed) == count:
                return Chosen(sorted(chosen.removed), scores, whole, chosen.rounds)
            now = score(left, 1)

    _whole: float | None = None

    def influences(self, left: Sequence[int], length: int) -> list[float]:
        """Return the mean of 1 - cos between what enters and what leaves runs of `length` blocks.
        Only the blocks that are left count.
        """
        inputs = self._inputs()
        entering: deque[Tensor] = deque(maxlen=length)
        found = []
        with self.progress.task("block influence", len(left), "blocks") as task:
            for index in left:
                self.skeleton.load_(self.skeleton.blocks[index].name, self.device)
                entering.append(inputs.copied())
                self.skeleton.advance_(index, inputs)
                self.skeleton.release_(self.skeleton.blocks[index].name)
                if len(entering) == length:
                    pairs = zip(*(map(self._on_device, each) for each in (entering[0], inputs.hidden)), strict=True)
                    found.append(sum(block_influence(*pair) for pair in pairs) / self.tokens.numel())
                task.advance(note=self.skeleton.blocks[index].name)
        return found

    def perplexities(self, left: Sequence[int], length: int) -> list[float]:
        """Return the text's perplexity without each run of `length` of the blocks that are left.

        The hidden states of all these models are in memory: each begins as a copy of the whole
        one's in front of the run that it skips.
        """
        inputs = self._inputs()
        streams: list[Tensor] = []
        with self.progress.task("perplexity without each block", len(left), "blocks") as task:
            for place, index in enumerate(left):
                self.skeleton.load_(self.skeleton.blocks[index].name, self.device)
                if place + length <= len(left):
                    streams.append(inputs.copied())
                for stream in streams[: max(0, place - length + 1)]:
                    self.skeleton.advance_(index, inputs, stream)
                self.skeleton.advance_(index, inputs)
                self.skeleton.release_(self.skeleton.blocks[index].name)
                task.advance(note=self.skeleton.blocks[index].name)
        self.skeleton.load_outside_(self.device)
        if len(left) == len(self.skeleton.blocks):
            self._whole = self._perplexity(inputs.hidden)
        found = [self._perplexity(stream) for stream in streams]
        self.skeleton.release_outside_()
        return found

    def _on_device(self, sequence: Tensor) -> Tensor:
        return sequence.to(self.device)

    def _inputs(self) -> BlockInputs:
        return self.skeleton.capture_inputs(self.tokens, self.device, self.batch_size)

    @torch.no_grad()
    def _perplexity(self, hidden: Tensor) -> float:
        """float [sequences, sequence_length, hidden], behind the last block.
        Every token but the first of a sequence is predicted.
        """
        total = 0.0
        for row, tokens in zip(map(self._on_device, hidden), self.tokens.to(self.device), strict=True):
            parts = zip(row[:-1].split(self.positions_at_once), tokens[1:].split(self.positions_at_once), strict=True)
            for part, next_tokens in parts:
                logits = logits_behind(self.skeleton.model, self.skeleton.blocks, part[None])[0].float()
                total += float(torch.nn.functional.cross_entropy(logits, next_tokens, reduction="sum"))
        return float(torch.tensor(total / (self.tokens.numel() - len(self.tokens)), dtype=torch.float64).exp())


def _ranked(scores: Sequence[float]) -> list[int]:
    """Return the places of scores, that of the least first."""
    return sorted(range(len(scores)), key=scores.__getitem__)
