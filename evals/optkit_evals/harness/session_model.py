"""A session as the harness' language model: what its tasks ask, computed in batches.

Requests are batched as the harness does it for transformers (`HFLM`), so that both compute the same
products. Several continuations of one context are computed behind one pass of that context if the
session can; their numbers then differ in the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.models.utils import Collator
from torch import Tensor

from optkit.common.grouping import by_key
from optkit.errors import EvalError
from optkit.measure import Session, SharingSession
from optkit.progress import Progress, SilentProgress
from optkit_evals.harness.language_model import LanguageModel, Prompt, Request, Scored


class SessionModel(LanguageModel):
    """Answers the harness' requests with a session."""

    def __init__(
        self,
        tokenizer: Any,
        session: Session,
        *,
        batch_size: int = 1,
        shared_context: bool = False,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(tokenizer, session.positions, truncate=truncate)
        self._session, self._batch_size = session, batch_size
        self._shares = shared_context and isinstance(session, SharingSession) and session.shares_contexts
        self._progress = progress or SilentProgress()

    def score(self, requests: list[Request]) -> list[Scored]:
        """Compute log-likelihoods; raises EvalError for NaN."""
        found: dict[int, Scored] = {}
        with self._progress.task("lm_eval", len(requests), "requests") as task:
            shared = self._branching(requests) if self._shares else []
            for batch in shared:
                found.update(self._behind_contexts(requests, batch))
                task.advance(sum(map(len, batch)))
            rest = [index for index in range(len(requests)) if index not in found]
            found |= zip(rest, self._in_batches([requests[index] for index in rest], task.advance), strict=True)
        return [found[index] for index in range(len(requests))]

    def score_windows(self, windows: list[Request]) -> list[Scored]:
        """Compute windows in the order of their texts, as the harness does."""
        starts = range(0, len(windows), self._batch_size)
        batches = (windows[start : start + self._batch_size] for start in starts)
        return [scored for batch in batches for scored in self._in_batches(batch)]

    def write(self, prompts: list[Prompt]) -> list[list[int]]:
        """Write answers; prompts of one length are answered together."""
        groups = by_key(((len(each.tokens), each.new_tokens, each.stops), index) for index, each in enumerate(prompts))
        answers: dict[int, list[int]] = {}
        with self._progress.task("lm_eval", len(prompts), "answers") as task:
            for (*_, stops), group in sorted(groups.items(), key=lambda each: -each[0][0]):
                for start in range(0, len(group), self._batch_size):
                    some = group[start : start + self._batch_size]
                    answers |= zip(some, self._answers([prompts[index] for index in some], stops), strict=True)
                    task.advance(len(some))
        return [answers[index] for index in range(len(prompts))]

    def _answers(self, prompts: list[Prompt], stops: tuple[str, ...]) -> list[list[int]]:
        ends = self._ends()
        written: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)
        tokens = torch.tensor([prompt.tokens for prompt in prompts])
        for step in self._session.stream(tokens, prompts[0].new_tokens):
            for index, token in enumerate(step.tolist()):
                if not done[index]:
                    written[index].append(token)
                    text = self.tokenizer.decode(written[index])
                    done[index] = token in ends or any(stop in text for stop in stops if stop)
            if all(done):
                break
        return written

    def _ends(self) -> set[int]:
        """Return the tokens that end an answer, as transformers knows them."""
        from transformers import GenerationConfig

        try:
            named = GenerationConfig.from_pretrained(self._session.directory).eos_token_id
        except OSError:
            named = None
        others = named if isinstance(named, list) else [] if named is None else [named]
        return {self.eot_token_id, *others}

    def _branching(self, requests: list[Request]) -> list[list[list[int]]]:
        """Return batches of contexts of one length, each with the requests that continue it.
        A context is among them if at least two continuations need passes of their own.
        """
        contexts = by_key(
            (tuple(context), index)
            for index, (_, context, continuation) in enumerate(requests)
            if len(context) > 1 and len(context) + len(continuation) - 1 <= self.max_length
        )
        several = [
            (context, asked)
            for context, asked in contexts.items()
            if len({tuple(requests[index][2][:-1]) for index in asked}) > 1
        ]
        batches: list[list[list[int]]] = []
        length = 0
        for tokens, asked in sorted(several, key=lambda each: -len(each[0])):
            if batches and length == len(tokens) and sum(map(len, batches[-1])) + len(asked) <= self._batch_size:
                batches[-1].append(asked)
            else:
                batches.append([asked])
            length = len(tokens)
        return batches

    def _behind_contexts(self, requests: list[Request], batch: list[list[int]]) -> Iterator[tuple[int, Scored]]:
        """Yield the score of each request of a batch, all contexts computed once."""
        session = self._session
        assert isinstance(session, SharingSession)
        contexts = torch.tensor([requests[asked[0]][1] for asked in batch])
        indices = [index for asked in batch for index in asked]
        owners = torch.tensor([place for place, asked in enumerate(batch) for _ in asked])
        inputs = [[requests[index][1][-1], *requests[index][2][:-1]] for index in indices]
        logits = session.continued_logits(contexts[:, :-1], _padded(inputs), owners)
        for index, row in zip(indices, logits, strict=True):
            continuation = requests[index][2]
            yield index, self._scored(row[: len(continuation)], continuation)

    def _in_batches(self, requests: list[Request], advance: Any = lambda count: None) -> list[Scored]:
        """Return the scores of requests, computed longest first; those of equal inputs are one."""
        ordered = Collator(
            requests,
            sort_fn=lambda request: (-len(request[1]) - len(request[2]), tuple(request[1] + request[2])),
            group_by="contexts",
            group_fn=lambda request: tuple(request[1] + request[2][:-1]),
        )
        session = self._session
        found: list[Scored] = []
        for batch in ordered.get_batched(n=self._batch_size):
            inputs = [(context + continuation)[-self.max_length - 1 : -1] for _, context, continuation in batch]
            logits = session.logits(_padded(inputs))
            before = len(found)
            for (asked, context, continuation), given, row in zip(batch, inputs, logits, strict=True):
                rows = row[len(given) - len(continuation) : len(given)]
                for _, tokens, _ in ordered.get_cache(asked, context, continuation, rows[None]):
                    found.append(self._scored(rows[-len(tokens) :], tokens))
            advance(len(found) - before)
        return list(ordered.get_original(found))

    def _scored(self, logits: Tensor, continuation: list[int]) -> Scored:
        """Score a continuation by the logits of its tokens, float32 [tokens, vocabulary]."""
        tokens = torch.tensor(continuation, device=logits.device)
        loss = float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum())
        if not math.isfinite(loss):
            raise EvalError(
                f"the log-likelihood of an answer is {loss}",
                where=str(self._session.directory),
                why="Logits are NaN or Inf: the weights are damaged, or the dtype overflows",
                remedy="Open it in float32 or bfloat16",
            )
        return loss, bool((logits.argmax(-1) == tokens).all())


def _padded(sequences: list[list[int]]) -> Tensor:
    """Return sequences, padded at their ends with token 0, int64 [sequences, longest]."""
    longest = max(map(len, sequences))
    return torch.tensor([each + [0] * (longest - len(each)) for each in sequences])
