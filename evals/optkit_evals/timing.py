"""Time one model's answers, token by token: warm-up until it has settled, then repeats."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from optkit.measure import Session
from optkit.progress import Task
from optkit.statistics import quantile

if TYPE_CHECKING:
    from torch import Tensor

SETTLED = 0.10
"""Two successive runs whose times differ by less than this fraction: compilation, caches and clocks have settled."""
MOST_FURTHER_RUNS = 10
"""Warm-up runs beyond those asked for, after which it is given up."""


@dataclass(frozen=True)
class Timing:
    """One answer: seconds to the first token (prefill, and choosing it) and between the others."""

    first_token_s: float
    between_tokens_s: tuple[float, ...]

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return sum(self.between_tokens_s)

    @property
    def total_s(self) -> float:
        """From the prompt to the last token."""
        return self.first_token_s + self.decode_s

    def between_quantile_s(self, fraction: float) -> float:
        """A quantile of the times between tokens."""
        return quantile(self.between_tokens_s, fraction)


def answer(session: Session, tokens: Tensor, new_tokens: int) -> Timing:
    """Let the session answer once, int64 [batch, prompt], and return when its tokens came."""
    moments = [time.perf_counter()]
    moments += [time.perf_counter() for _ in session.stream(tokens, new_tokens)]
    first, *between = [later - earlier for earlier, later in pairwise(moments)]
    return Timing(first, tuple(between))


def warm_up(session: Session, tokens: Tensor, new_tokens: int, runs: int, task: Task) -> tuple[int, bool]:
    """Let the session answer at least `runs` times and until two successive runs agree; return how many it took and whether they did."""
    times: list[float] = []
    while len(times) < runs + MOST_FURTHER_RUNS:
        times.append(answer(session, tokens, new_tokens).total_s)
        task.advance()
        if len(times) >= max(runs, 2) and abs(times[-1] - times[-2]) < SETTLED * times[-2]:
            return len(times), True
    return len(times), False


def random_tokens(session: Session, batch: int, prompt: int, seed: int) -> Tensor:
    """Return seeded token ids of the session's vocabulary, int64 [batch, prompt], on its device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(session.vocabulary, (batch, prompt), generator=generator).to(session.device)
