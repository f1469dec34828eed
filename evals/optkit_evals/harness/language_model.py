"""The harness' language model as far as all engines share it: requests become tokens, as for transformers
(`HFLM`), and answers become what the harness scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text

from optkit.errors import EvalError

Scored = tuple[float, bool]
"""Log-likelihood in nats, and whether greedy decoding would write the same."""
Request = tuple[Any, list[int], list[int]]
"""What is asked, and the tokens of context and continuation."""
MOST_NEW_TOKENS = 256
"""Of an answer whose task does not say; as the harness has it."""


@dataclass(frozen=True)
class Prompt:
    """What is to be answered greedily."""

    tokens: list[int]
    new_tokens: int
    stops: tuple[str, ...]
    """Texts that end the answer and do not belong to it."""


class LanguageModel(TemplateLM):
    """Makes tokens of the harness' requests and checks their lengths; who computes overrides `score`
    and `write`.
    """

    def __init__(self, tokenizer: Any, positions: int, *, truncate: bool = False) -> None:
        super().__init__()
        self.tokenizer, self.max_length, self._truncate = tokenizer, positions, truncate

    def score(self, requests: list[Request]) -> list[Scored]:
        """Return the log-likelihood of each continuation, in nats, and whether it is the greedy one."""
        return [(0.0, False)] * len(requests)

    def score_windows(self, windows: list[Request]) -> list[Scored]:
        """Return the same of windows of texts, in their order."""
        return self.score(windows)

    def write(self, prompts: list[Prompt]) -> list[list[int]]:
        """Return the tokens of each greedy answer, up to its end or the first stop."""
        return [[] for _ in prompts]

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
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's tokens, with the tokenizer's own special tokens unless told otherwise."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's chat template writes it; without the system's words if
        it has no place for them, as in the harness. Raises EvalError if there is no template.
        """
        if self.tokenizer.chat_template is None:
            raise EvalError(
                "the tokenizer has no chat template",
                where="lm_eval",
                why="It is the tokenizer of a model that was not trained on conversations",
                remedy="Leave chat_template out, or measure the model's instruct form",
            )
        try:
            return self._templated(chat_history, add_generation_prompt)
        except jinja2.exceptions.TemplateError:
            rest = [message for message in chat_history if message["role"] != "system"]
            return self._templated(rest, add_generation_prompt)

    def _templated(self, messages: list[dict[str, str]], prompted: bool) -> str:
        options = {"add_generation_prompt": prompted, "continue_final_message": not prompted}
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[Scored]:
        """Return the log-likelihood of each continuation.
        Raises EvalError for a request that is longer than the model's positions, or NaN.
        """
        self._items = [(request.task_name, request.doc_id) for request in requests]
        found: list[Scored] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text, read in windows of all positions."""
        owners: list[int] = []
        windows: list[Request] = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            parts = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            windows += [(None, *utils.make_disjoint_window(part)) for part in parts]
            owners += [index] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for index, (loss, _) in zip(owners, self.score_windows(windows), strict=True):
            totals[index] += loss
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the greedy answer to each request, up to its stop sequences.
        Raises EvalError if a task wants to draw, or a prompt leaves no room for its answer.
        """
        prompts = [self._prompt(request) for request in requests]
        texts = (self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in self.write(prompts))
        return [
            postprocess_generated_text(text, list(prompt.stops), None)
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    def _prompt(self, request: Any) -> Prompt:
        context, options = request.args
        kwargs: Mapping[str, Any] = normalize_gen_kwargs(options, MOST_NEW_TOKENS)
        if kwargs.get("do_sample"):
            raise EvalError(
                "it draws its answers (do_sample)",
                where=request.task_name,
                why="Two models can be compared by greedy answers alone",
                remedy="Set do_sample: false in its definition",
            )
        stops = handle_stop_sequences(kwargs.get("until"), self.tokenizer.decode(self.eot_token_id))
        tokens = self._fitting(self.tok_encode(context), kwargs["max_gen_toks"], request)
        return Prompt(tokens, kwargs["max_gen_toks"], tuple(stops))

    def _fitting(self, tokens: list[int], new_tokens: int, request: Any) -> list[int]:
        room = self.max_length - new_tokens
        if len(tokens) > room and not (self._truncate and room > 0):
            raise self._too_long(f"{len(tokens):,} tokens and an answer of {new_tokens:,}", request.task_name, request)
        return tokens[-room:]

    def _loglikelihood_tokens(self, requests: list[Request], **_: Any) -> list[Scored]:
        for request, (task, item) in zip(requests, self._items, strict=True):
            length = len(request[1]) + len(request[2]) - 1
            if length > self.max_length and not (self._truncate and len(request[2]) <= self.max_length):
                raise self._too_long(f"{length:,} tokens", task, item)
        return self.score(requests)

    def _too_long(self, told: str, task: str, item: Any) -> EvalError:
        number = getattr(item, "doc_id", item)
        return EvalError(
            f"item {number} has {told}, and the model has {self.max_length:,} positions",
            where=task,
            why="Cut off, it would be another question",
            remedy="Lower few_shot, or set truncate: true to cut it off from the left as the harness does",
        )
