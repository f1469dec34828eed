"""A session as the harness' language model: what its tasks ask, computed in batches.

Requests are tokenized, cut and batched as the harness does it for transformers (`HFLM`), so that
both compute the same products. Several continuations of one context are computed behind one pass
of that context if the session can; their numbers then differ in the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from torch import Tensor

from optkit.errors import EvalError
from optkit.measure import Session, SharingSession
from optkit.progress import Progress, SilentProgress

Scored = tuple[float, bool]
"""Log-likelihood in nats, and whether greedy decoding would write the same."""
Request = tuple[Any, list[int], list[int]]
"""What is asked, and the tokens of context and continuation."""
MOST_NEW_TOKENS = 256
"""Of an answer whose task does not say; as the harness has it."""


class SessionModel(TemplateLM):
    """Answers the harness' requests with a session; without one it only checks their lengths."""

    def __init__(
        self,
        tokenizer: Any,
        positions: int,
        session: Session | None = None,
        *,
        batch_size: int = 1,
        shared_context: bool = False,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer, self.max_length, self._session = tokenizer, positions, session
        self._batch_size, self._truncate = batch_size, truncate
        self._shares = shared_context and isinstance(session, SharingSession) and session.shares_contexts
        self._progress = progress or SilentProgress()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Name the tokenizer."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's tokens, with the tokenizer's own special tokens unless told otherwise."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's chat template writes it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[Scored]:
        """Return the log-likelihood of each continuation.
        Raises EvalError for a request that is longer than the model's positions, or NaN.
        """
        self._items = [(request.task_name, request.doc_id) for request in requests]
        found: list[Scored] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text, read in windows of all positions."""
        windows: list[tuple[int, Request]] = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            parts = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            windows += [(index, (None, *utils.make_disjoint_window(part))) for part in parts]
        totals = [0.0] * len(requests)
        for start in range(0, len(windows), self._batch_size) if self._session else ():
            some = windows[start : start + self._batch_size]
            self._items = [(requests[index].task_name, requests[index].doc_id) for index, _ in some]
            for (index, _), (loss, _) in zip(some, self._in_batches([each for _, each in some]), strict=True):
                totals[index] += loss
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the greedy answer to each request, up to its stop sequences.
        Prompts of one length are answered together. Raises EvalError if a task wants to draw, or a
        prompt leaves no room for its answer.
        """
        groups: dict[tuple[int, str], list[tuple[int, list[int], Mapping[str, Any]]]] = {}
        for index, request in enumerate(requests):
            context, options = request.args
            kwargs = normalize_gen_kwargs(options, MOST_NEW_TOKENS)
            if kwargs.get("do_sample"):
                raise EvalError(
                    "it draws its answers (do_sample)",
                    where=request.task_name,
                    why="Two models can be compared by greedy answers alone",
                    remedy="Set do_sample: false in its definition",
                )
            tokens = self._fitting(self.tok_encode(context), kwargs["max_gen_toks"], request)
            groups.setdefault((len(tokens), repr(options)), []).append((index, tokens, kwargs))
        answers = [""] * len(requests)
        with self._progress.task("lm_eval", len(requests), "answers") as task:
            for group in sorted(groups.values(), key=lambda group: -len(group[0][1])) if self._session else ():
                for start in range(0, len(group), self._batch_size):
                    some = group[start : start + self._batch_size]
                    texts = self._answers([tokens for _, tokens, _ in some], some[0][2])
                    for (index, _, _), text in zip(some, texts, strict=True):
                        answers[index] = text
                    task.advance(len(some))
        return answers

    def _fitting(self, tokens: list[int], new_tokens: int, request: Any) -> list[int]:
        room = self.max_length - new_tokens
        if len(tokens) > room and not (self._truncate and room > 0):
            raise self._too_long(f"{len(tokens):,} tokens and an answer of {new_tokens:,}", request.task_name, request)
        return tokens[-room:]

    def _answers(self, prompts: list[list[int]], options: Mapping[str, Any]) -> list[str]:
        session, ends = self._session, self._ends()
        assert session is not None
        stops = handle_stop_sequences(options.get("until"), self.tokenizer.decode(self.eot_token_id))
        written: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)
        for step in session.stream(torch.tensor(prompts), options["max_gen_toks"]):
            for index, token in enumerate(step.tolist()):
                if not done[index]:
                    written[index].append(token)
                    text = self.tokenizer.decode(written[index])
                    done[index] = token in ends or any(stop in text for stop in stops if stop)
            if all(done):
                break
        texts = (self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written)
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _ends(self) -> set[int]:
        """Return the tokens that end an answer, as transformers knows them."""
        from transformers import GenerationConfig

        assert self._session is not None
        try:
            named = GenerationConfig.from_pretrained(self._session.directory).eos_token_id
        except OSError:
            named = None
        others = named if isinstance(named, list) else [] if named is None else [named]
        return {self.eot_token_id, *others}

    def _loglikelihood_tokens(self, requests: list[Request], **_: Any) -> list[Scored]:
        for request, (task, item) in zip(requests, self._items, strict=True):
            length = len(request[1]) + len(request[2]) - 1
            if length > self.max_length and not (self._truncate and len(request[2]) <= self.max_length):
                raise self._too_long(f"{length:,} tokens", task, item)
        if self._session is None:
            return [(0.0, False)] * len(requests)
        found: dict[int, Scored] = {}
        with self._progress.task("lm_eval", len(requests), "requests") as task:
            shared = self._branching(requests) if self._shares else []
            for batch in shared:
                for index, scored in self._behind_contexts(requests, batch):
                    found[index] = scored
                task.advance(sum(map(len, batch)))
            rest = [index for index in range(len(requests)) if index not in found]
            for index, scored in zip(
                rest, self._in_batches([requests[index] for index in rest], task.advance), strict=True
            ):
                found[index] = scored
        return [found[index] for index in range(len(requests))]

    def _branching(self, requests: list[Request]) -> list[list[list[int]]]:
        """Return batches of contexts of one length, each with the requests that continue it.
        A context is among them if at least two continuations need passes of their own.
        """
        contexts: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if len(context) > 1 and len(context) + len(continuation) - 1 <= self.max_length:
                contexts.setdefault(tuple(context), []).append(index)
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
        assert session is not None
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
            assert self._session is not None
            raise EvalError(
                f"the log-likelihood of an answer is {loss}",
                where=str(self._session.directory),
                why="Logits are NaN or Inf: the weights are damaged, or the dtype overflows",
                remedy="Open it in float32 or bfloat16",
            )
        return loss, bool((logits.argmax(-1) == tokens).all())

    def _too_long(self, told: str, task: str, item: Any) -> EvalError:
        number = getattr(item, "doc_id", item)
        return EvalError(
            f"item {number} has {told}, and the model has {self.max_length:,} positions",
            where=task,
            why="Cut off, it would be another question",
            remedy="Lower few_shot, or set truncate: true to cut it off from the left as the harness does",
        )


def _padded(sequences: list[list[int]]) -> Tensor:
    """Return sequences, padded at their ends with token 0, int64 [sequences, longest]."""
    longest = max(map(len, sequences))
    return torch.tensor([each + [0] * (longest - len(each)) for each in sequences])
