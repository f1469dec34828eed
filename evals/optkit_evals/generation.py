"""Greedy answers to the user's own prompts, of the artifact and the unmodified model side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from optkit.common.field_types import Count, Name, Several
from optkit.common.files import read_text, sha256_of
from optkit.common.grouping import common_prefix
from optkit.common.statistics import Estimate, mean, mean_estimate, share_estimate
from optkit.errors import EvalError, SourceError
from optkit.measure import Attachment, Eval, EvalContext, Found, Metric, Session
from optkit.model.session_memory import SessionMemory
from optkit.source.digests import PREFIX, require_revision
from optkit.source.text_files import read_records
from optkit.source.text_place import TextPlace
from optkit.source.tokenizer import load_tokenizer
from optkit_evals.meanings import row

ANSWERS, BESIDE = "answers.jsonl", "side_by_side.jsonl"
GRAM = 4
"""Tokens in a row that count as repeated if they stood before."""
USUAL_PROMPT = 256
"""Tokens, to say how much memory will be needed."""


class Generation(Eval):
    """How greedy answers to prompts differ from the baseline's, and how much they repeat themselves.

    `common_prefix` is the mean number of tokens before two answers differ; `same_answers` is the
    share of answers that never do. `repetition` is the share of 4-grams of an answer that stood in
    it before. Both models' answers are in a file, side by side.
    """

    kind: ClassVar[str] = "generation"
    example: ClassVar[str] = "- generation: {prompts: prompts.jsonl, new_tokens: 64}"
    draws: ClassVar[bool] = False
    shorthand: ClassVar[str] = "prompts"
    contrasted: ClassVar[frozenset[str]] = frozenset({"common_prefix", "same_answers"})
    metrics: ClassVar[Mapping[str, str]] = {
        "repetition": "fraction",
        "common_prefix": "tokens",
        "same_answers": "fraction",
    }

    prompts: Name
    """A .txt file with a prompt on each line, or a .jsonl file."""
    field: Name = "prompt"
    """Which field of a record of a .jsonl file is the prompt."""
    revision: Name | None = None
    """`sha256:...` of the file; left out, it is pinned before anything runs."""
    limit: Count | None = None
    """Prompts, from the start of the file; all of them when null."""
    new_tokens: Several = 64
    """Tokens of an answer, at most; it ends before them if the model ends it."""
    chat_template: bool = False
    """Write each prompt as a user's turn, by the model's chat template."""

    @property
    def local_place(self) -> str:
        """The path of the prompts, of which an artifact says the name alone."""
        return self.prompts

    def pinned(self, data: Path | None) -> Self:
        """Return the eval with the digest of its prompts; raises SourceError if they were changed."""
        revision = PREFIX + sha256_of(self._path())
        require_revision("the file of prompts", revision, self.revision, self.prompts)
        self._read()
        return self.model_copy(update={"revision": revision})

    def faults(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield what is wrong with the file."""
        try:
            self._read()
        except SourceError as error:
            yield ("prompts",), str(error)

    def check_texts(self, place: TextPlace) -> None:
        """Refuse a prompt that leaves no room for its answer, and a chat template that is not there."""
        if not place.transformers:
            return
        tokenizer = load_tokenizer(place.tokenizer, place.trust_remote_code)
        for index, prompt in enumerate(self._read()):
            tokens = self._tokens(tokenizer, tokenizer.encode, prompt)
            if place.positions:
                self._check_room(index, tokens, place.positions)

    def working_bytes(self, model: SessionMemory) -> int:
        return model.forward(1, USUAL_PROMPT) + 2 * model.logits(1) + model.cache(1, USUAL_PROMPT + self.new_tokens)

    def run(self, session: Session, context: EvalContext) -> Iterator[Metric | Attachment]:
        """Answer; raises EvalError for a prompt that leaves no room for its answer."""
        prompts = self._read()
        answers = []
        with context.progress.task("generation", len(prompts), "answers") as task:
            for index, prompt in enumerate(prompts):
                answers.append({"prompt": prompt, **self._answer(session, index, prompt)})
                task.advance(1)
        shares = [repeated(each["tokens"]) for each in answers]
        yield self._metric("repetition", _estimate(shares, 1.0), shares)
        yield Attachment.of_records(ANSWERS, answers)

    def contrast(self, found: Found, baseline: Found) -> Iterable[Metric | Attachment]:
        """Return how long the answers of two models are the same, and both side by side."""
        pairs = list(zip(_answers(found), _answers(baseline), strict=True))
        common = [float(common_prefix(ours["tokens"], theirs["tokens"])) for ours, theirs in pairs]
        same = [float(ours["tokens"] == theirs["tokens"]) for ours, theirs in pairs]
        yield self._metric("common_prefix", _estimate(common, float(self.new_tokens)), common)
        yield self._metric("same_answers", share_estimate(same, (1,) * len(same)), same)
        beside = [
            {
                "prompt": ours["prompt"],
                "unmodified": theirs["answer"],
                "artifact": ours["answer"],
                "common_prefix": int(length),
                "same": bool(equal),
            }
            for (ours, theirs), length, equal in zip(pairs, common, same, strict=True)
        ]
        yield Attachment.of_records(BESIDE, beside)

    def _path(self) -> Path:
        path = Path(self.prompts).expanduser()
        if path.suffix not in (".txt", ".jsonl"):
            raise SourceError(f"'{self.prompts}' is no file of prompts", remedy="Name a .txt or .jsonl file")
        if not path.is_file():
            why = f"A path counts from the directory in which optkit runs, {Path.cwd()}"
            raise SourceError(f"there is no file {path}", why=why)
        return path

    def _read(self) -> list[str]:
        path = self._path()
        found = read_records([path], self.field) if path.suffix == ".jsonl" else read_text(path).splitlines()
        prompts = [each for each in found if each.strip()][: self.limit]
        if not prompts:
            raise SourceError("there are no prompts", where=str(path), remedy="Write one on each line")
        return prompts

    def _answer(self, session: Session, index: int, prompt: str) -> dict[str, Any]:
        tokenizer: Any = getattr(session, "tokenizer", None)
        tokens = self._tokens(tokenizer, lambda text: session.encode(text).tolist(), prompt)
        self._check_room(index, tokens, session.positions)
        import torch

        end, written = getattr(tokenizer, "eos_token_id", None), []
        for step in session.stream(torch.tensor([tokens]), self.new_tokens):
            written.append(int(step[0]))
            if written[-1] == end:
                break
        answer = tokenizer.decode(written, skip_special_tokens=True) if tokenizer else ""
        return {"answer": answer, "tokens": written}

    def _tokens(self, tokenizer: Any, encode: Callable[[str], list[int]], prompt: str) -> list[int]:
        """Return a prompt as the model reads it. Raises EvalError without a chat template that is asked for."""
        if not self.chat_template:
            return encode(prompt)
        if not tokenizer.chat_template:
            why = "It is the tokenizer of a model that was not trained on conversations"
            remedy = "Leave chat_template out, or measure the model's instruct form"
            raise EvalError("the tokenizer has no chat template", where=self.kind, why=why, remedy=remedy)
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _check_room(self, index: int, tokens: Sequence[int], positions: int) -> None:
        if len(tokens) + self.new_tokens > positions:
            raise EvalError(
                f"prompt {index + 1} has {len(tokens):,} tokens, and with {self.new_tokens:,} new ones they are "
                f"more than the model's {positions:,} positions",
                where=self.prompts,
                remedy="Shorten it, or lower new_tokens",
            )

    def _metric(self, name: str, estimate: Estimate, samples: Sequence[float]) -> Metric:
        revision = (self.revision or "").removeprefix(PREFIX)[:12]
        template = "chat template" if self.chat_template else "no chat template"
        protocol = (
            f"{len(samples)} prompts of {Path(self.prompts).name} (sha256 {revision}), greedy answers of at "
            f"most {self.new_tokens} tokens, {template}"
        )
        return row(self, name, estimate, protocol, samples, pairing="paired_mean")


def repeated(tokens: Sequence[int]) -> float:
    """Return the share of a text's 4-grams that stood in it before; 0 of a shorter one."""
    grams = [tuple(tokens[start : start + GRAM]) for start in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _estimate(samples: Sequence[float], most: float) -> Estimate:
    return mean_estimate(samples, 0.0, most) if len(samples) > 1 else Estimate(mean(samples))


def _answers(found: Found) -> list[dict[str, Any]]:
    return next(each for each in found.attachments if each.name == ANSWERS).records()
