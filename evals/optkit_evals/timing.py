"""Time one model's answers, token by token.
After a warm-up until it has settled come repeats until the interval is narrow.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from optkit.common.garbage import uncollected
from optkit.common.statistics import mean, standard_error
from optkit.environment import describe_environment
from optkit.errors import EvalError
from optkit.measure import Opened, QueueingSession, Session
from optkit.progress import Task

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event

SETTLED = 0.03
"""The mean of the last two runs moves by less than this fraction with another run: compilation,
caches and clocks have settled.
"""
MOST_FURTHER_RUNS = 10
"""Warm-up runs beyond those asked for, after which it is given up."""


def device_text(device: str) -> str:
    """Return what a protocol says of the machine: its name, the threads of a CPU, torch."""
    environment = describe_environment(device)
    threads = f", {environment['cpu_threads']} threads" if device == "cpu" else ""
    return f"{environment['device_name']}{threads}, torch {environment['torch']}"


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


@dataclass(frozen=True)
class WarmUp:
    """How a warm-up ended."""

    runs: int
    settled: bool
    further_s: float
    """Of the runs beyond those asked for."""


def answer(session: Session, tokens: Tensor, new_tokens: int) -> Timing:
    """Let the session answer once, int64 [batch, prompt], and return when its tokens came.

    Torch on a GPU is timed by CUDA events behind each token, so that no token waits until Python
    has seen the one before; everything else by the wall clock, when the device has finished a
    token.
    """
    if session.device != "cpu" and isinstance(session, QueueingSession):
        return _answer_by_events(session, tokens, new_tokens)
    moments = [time.perf_counter()]
    moments += [time.perf_counter() for _ in session.stream(tokens, new_tokens)]
    first, *between = [later - earlier for earlier, later in pairwise(moments)]
    return Timing(first, tuple(between))


def _answer_by_events(session: QueueingSession, tokens: Tensor, new_tokens: int) -> Timing:
    import torch

    device = session.device
    torch.cuda.synchronize(device)
    events = [_event(device)]
    events += [_event(device) for _ in session.queue(tokens, new_tokens)]
    torch.cuda.synchronize(device)
    first, *between = [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(events)]
    return Timing(first, tuple(between))


def _event(device: str) -> Event:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def warm_up(session: Session, tokens: Tensor, new_tokens: int, runs: int, limit_s: float, task: Task) -> WarmUp:
    """Let the session answer at least `runs` times and until the running mean stands still.
    Not longer than `limit_s` beyond those.
    """
    times: list[float] = []
    least, settled = max(runs, 2), False
    while not settled and len(times) < runs + MOST_FURTHER_RUNS and (len(times) < least or sum(times[runs:]) < limit_s):
        times.append(answer(session, tokens, new_tokens).total_s)
        task.advance()
        settled = len(times) >= least and abs(mean(times[-2:]) - mean(times[-3:-1])) < SETTLED * mean(times[-3:-1])
    return WarmUp(len(times), settled, sum(times[runs:]))


def is_certain(timings: Sequence[Timing], error: float) -> bool:
    """Say whether the relative standard errors of prefill and decode are at most `error`; needs two."""
    first, decode = [each.first_token_s for each in timings], [each.decode_s for each in timings]
    return all(standard_error(samples) <= error * mean(samples) for samples in (first, decode))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Python's garbage collector out of the timings."""
    gc.collect()
    with uncollected():
        yield


def check_room(session: Session, prompt: int, new_tokens: int, where: str, remedy: str) -> None:
    """Raise EvalError if the model has too few positions for a prompt with its answer."""
    if prompt + new_tokens > session.positions:
        asked = f"a prompt of {prompt} and {new_tokens} new tokens"
        what = f"{asked} are more than the model's {session.positions} positions"
        raise EvalError(what, where=where, remedy=remedy)


def random_tokens(session: Opened, batch: int, prompt: int, seed: int) -> Tensor:
    """Return seeded token ids of the session's vocabulary, int64 [batch, prompt], on its device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(session.vocabulary, (batch, prompt), generator=generator).to(session.device)
