"""vLLM as the harness' language model: all requests are collected, asked in one process, and answered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from optkit.errors import EvalError
from optkit.measure import EvalContext, Session
from optkit_evals.harness.asking import Asking, Loaded
from optkit_evals.harness.language_model import LanguageModel, Prompt, Request, Scored
from optkit_evals.vllm import ask_vllm, build_text

READ_FURTHER = 2
"""vLLM reads the last token of a text too and writes one more, so that a text may be so much shorter."""


class VllmModel(LanguageModel):
    """Collects what the harness asks; after `ask` it answers the same requests in the same order."""

    def __init__(self, tokenizer: Any, positions: int, *, truncate: bool = False) -> None:
        super().__init__(tokenizer, positions - READ_FURTHER, truncate=truncate)
        self._scored: list[tuple[list[int], int]] = []
        self._prompts: list[tuple[list[int], int, list[str]]] = []
        self._scores: Iterator[Scored] | None = None
        self._answers: Iterator[list[int]] = iter(())

    def score(self, requests: list[Request]) -> list[Scored]:
        """Collect texts and their ends that are scored, or return what vLLM said of them."""
        if self._scores:
            return [next(self._scores) for _ in requests]
        for _, context, continuation in requests:
            self._scored.append(((context + continuation)[-self.max_length - 1 :], len(continuation)))
        return super().score(requests)

    def write(self, prompts: list[Prompt]) -> list[list[int]]:
        """Collect prompts, or return what vLLM answered."""
        if self._scores:
            return [next(self._answers) for _ in prompts]
        self._prompts += [(prompt.tokens, prompt.new_tokens, [*filter(None, prompt.stops)]) for prompt in prompts]
        return super().write(prompts)

    def ask(self, session: Session) -> str:
        """Ask vLLM what was collected; return its build, dtype and quantization.
        Raises EvalError for what it cannot open or compute, and for NaN.
        """
        said = ask_vllm(session, "score_in_vllm.py", {"scored": self._scored, "prompts": self._prompts}, "lm_eval")
        if bad := next((loss for loss, _ in said["scores"] if not math.isfinite(loss)), None):
            raise EvalError(
                f"the log-likelihood of an answer is {bad}",
                where=str(session.directory),
                why=f"Logits are NaN or Inf under vLLM in {said['dtype']}: the weights are damaged, or it overflows",
            )
        self._scores = ((loss, greedy) for loss, greedy in said["scores"])
        self._answers = iter(said["answers"])
        return build_text(said)


def answer_under_vllm(
    asking: Asking, loaded: Sequence[Loaded], model: VllmModel, session: Session, context: EvalContext
) -> None:
    """Let vLLM answer all requests, with one start of it; note what answered."""
    asking.answer(loaded, model)
    with context.progress.task("lm_eval under vLLM", 1, "runs") as task:
        context.notes.append(f"lm_eval: {model.ask(session)}; prefix caching off")
        task.advance()
    for request in (request for each in loaded for request in each.requests):
        request.resps.clear()
    asking.answer(loaded, model)
