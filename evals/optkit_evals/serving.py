"""Serve requests that arrive at moments of their own.
They run in batches that end together, or with transformers' continuous batching.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from optkit.errors import EvalError
from optkit.measure import Session
from optkit.model.attention_choice import PHRASES, asked_of_attention
from optkit.progress import Task
from optkit_evals.timing import random_tokens

if TYPE_CHECKING:
    from torch import Tensor

WAIT_S = 1.0
"""How long a result is waited for before it is asked whether the engine still runs."""
BLOCK = 32
"""Tokens of a block of the paged KV cache."""
PAGED = frozenset({"s_aux"})
"""What a model may ask of attention that the paged attention of transformers computes with."""


@dataclass(frozen=True)
class Request:
    """A prompt, int64 [1, tokens], and when it arrives, in seconds from the start."""

    arrival_s: float
    tokens: Tensor


@dataclass(frozen=True)
class Served:
    """When a request arrived and when each of its tokens was there, in seconds from the start."""

    arrival_s: float
    token_times_s: tuple[float, ...]
    tokens: tuple[int, ...] = ()
    """What was generated, if the engine says it at the end."""

    @property
    def first_token_s(self) -> float:
        """From its arrival to its first token: waiting and prefill."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def between_tokens_s(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))

    @property
    def end_s(self) -> float:
        """When its last token was there."""
        return self.token_times_s[-1]


def poisson_requests(session: Session, rate: float, count: int, prompt: int, seed: int) -> list[Request]:
    """Return seeded requests of random tokens that arrive as a Poisson process.
    They are independent, `rate` of them in a second on average.
    """
    clock = random.Random(seed)
    moment = 0.0
    found = []
    for row in random_tokens(session, count, prompt, seed).split(1):
        moment += clock.expovariate(rate)
        found.append(Request(moment, row))
    return found


def serve_static(session: Session, requests: Sequence[Request], new_tokens: int, most: int, task: Task) -> list[Served]:
    """Serve what has arrived, up to `most` requests, in one batch.
    Those that arrive meanwhile wait until all of it has ended.
    """
    import torch

    waiting, served = deque(requests), list[Served]()
    start = time.perf_counter()
    while waiting:
        _sleep_until(start + waiting[0].arrival_s)
        now = time.perf_counter() - start
        batch: list[Request] = []
        while waiting and len(batch) < most and (not batch or waiting[0].arrival_s <= now):
            batch.append(waiting.popleft())
        tokens = torch.cat([request.tokens for request in batch])
        moments = tuple(time.perf_counter() - start for _ in session.stream(tokens, new_tokens))
        served += [Served(request.arrival_s, moments) for request in batch]
        task.advance(len(batch))
    return served


def serve_continuously(
    session: Any, requests: Sequence[Request], new_tokens: int, most: int, task: Task
) -> list[Served]:
    """Serve with transformers' continuous batching and a paged KV cache.
    A request joins those under way at the next step.

    Raises EvalError if the session is no torch model as transformers opens it, or the engine
    stops.
    """
    with _engine(session, requests, new_tokens, most) as manager:
        start = time.perf_counter()
        for index, request in enumerate(requests):
            _sleep_until(start + request.arrival_s)
            options = {"max_new_tokens": new_tokens, "record_timestamps": True, "eos_token_id": -1}
            manager.add_request(request.tokens[0].tolist(), str(index), **options)
        outputs: dict[int, Any] = {}
        while len(outputs) < len(requests):
            output = manager.get_result(timeout=WAIT_S)
            if output is None:
                _check_running(manager)
            elif output.error:
                raise EvalError("a request failed", where="load", why=str(output.error))
            elif output.is_finished():
                outputs[int(output.request_id)] = output
                task.advance()
    served = []
    for index, request in enumerate(requests):
        moments = tuple(moment - start for moment in outputs[index].timestamps)
        served.append(Served(request.arrival_s, moments, tuple(outputs[index].generated_tokens)))
    return served


@contextmanager
def _engine(session: Any, requests: Sequence[Request], new_tokens: int, most: int) -> Iterator[Any]:
    """Run transformers' engine on the session's model, with its own attention in paged form."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    refuse_other_engines(session)
    model = session.model
    attention = model.config._attn_implementation
    longest = max(request.tokens.shape[1] for request in requests) + new_tokens
    blocks = most * (-(-longest // BLOCK) + 1)
    model.set_attn_implementation(f"paged|{attention}")
    try:
        manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1),
            ContinuousBatchingConfig(
                block_size=BLOCK,
                num_blocks=blocks,
                max_batch_tokens=max(longest, 512),
                max_requests_per_batch=most,
                allow_block_sharing=False,
            ),
        )
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()
    finally:
        model.set_attn_implementation(attention)


def refuse_other_engines(session: Any) -> None:
    """Raise EvalError for a session whose settings transformers' engine would silently ignore."""
    from optkit.model.carried_state import keeps_keys_and_values

    why = ""
    if not hasattr(session, "model"):
        why = "It is the engine of transformers, and this model is not opened by it"
    elif getattr(session, "compiled", False):
        why = "It would run the model as it is, without the compiled step"
    elif session.decodes_itself:
        why = "It would run the model as it is, without the kernels that decode it here"
    elif getattr(session, "speculation", None) is not None:
        why = "It would decode token by token"
    elif any(parameter.is_meta for parameter in session.model.parameters()):
        why = "Its CUDA graphs hold the addresses of weights, and those that are offloaded come and go"
    elif not keeps_keys_and_values(session.model):
        why = "Its pages hold keys and values, and the model keeps a state of another kind"
    elif session.codes_cache:
        why = "Its KV cache would be one of floats"
    elif (asked := asked_of_attention(session.model.config.to_dict())) and asked not in PAGED:
        why = f"The paged attention of transformers leaves out {PHRASES[asked]}"
    if why:
        what, remedy = "continuous batching does not apply to this session", "Set batching: static"
        raise EvalError(what, where="load", why=why, remedy=remedy)


def _check_running(manager: Any) -> None:
    error = manager.background_thread_status.fatal_error
    if error is not None or not manager.is_running():
        what, remedy = "continuous batching has stopped", "Set batching: static, or lower prompt and new_tokens"
        why = f"{type(error).__name__}: {error}" if error else "Its thread has ended"
        raise EvalError(f"transformers' {what}", where="load", why=why, remedy=remedy)


def _sleep_until(moment: float) -> None:
    """Wait until the clock of `time.perf_counter` is there."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
