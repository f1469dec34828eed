"""What an encoder-decoder says of given inputs, beside what it should say: exact match, word errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from optkit.common.field_types import SequenceLength, Several
from optkit.common.statistics import mean_estimate, share_estimate
from optkit.errors import EvalError
from optkit.measure import Attachment, ConditionalSession, Eval, EvalContext, Metric
from optkit.model.session_memory import SessionMemory
from optkit.model.task import ENCODER_DECODERS, Task
from optkit.source.conditioned import ConditionedText
from optkit.source.text_place import TextPlace
from optkit_evals.meanings import row
from optkit_evals.windows import named, refuse_calibrated

NO_WORD = re.compile(r"[^\w\s']+")

COMPARED = {True: "in lower case without punctuation", False: "as written"}


class Answers(ConditionedText, Eval):
    """Exact match and word error rate (WER) of greedy answers to given inputs.

    WER is the words to replace, insert and delete until an answer is the target, over the words of
    all targets. Texts are compared in lower case and without punctuation.
    """

    kind: ClassVar[str] = "answers"
    example: ClassVar[str] = "- answers: {dataset: org/pairs, input: input, field: target, new_tokens: 128}"
    for_tasks: ClassVar[frozenset[Task]] = ENCODER_DECODERS
    draws: ClassVar[bool] = False
    sets_length: ClassVar[tuple[str, ...]] = ("new_tokens",)
    attributed: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {"exact_match": "fraction", "word_error_rate": "fraction"}

    new_tokens: SequenceLength = 128
    """Tokens of an answer at most; it ends before them if the model ends it."""
    pairs: Several | None = None
    """Pairs to measure, from the start of the file; all of them when null."""
    normalize: bool = True
    """Compare in lower case, without punctuation, white space made one space; false: as written."""

    def longest_sequence(self) -> int:
        return self.new_tokens

    def check_texts(self, place: TextPlace) -> None:
        self.check_task(place)
        if self.is_local(place.data):
            self.first_examples(place.data, self.pairs)

    def working_bytes(self, model: SessionMemory) -> int:
        return model.forward(1, self.new_tokens) + model.logits(1) + model.cache(1, self.new_tokens)

    def run(self, session: ConditionalSession, context: EvalContext) -> Iterator[Metric | Attachment]:
        """Answer; raises EvalError for targets without words, and for texts that were calibrated on."""
        text = self if self.revision else self.pinned(context.data)
        examples = text.first_examples(context.data, self.pairs)
        refuse_calibrated(text, [each.target for each in examples], context)
        answers: list[str] = []
        with context.progress.task("answers", len(examples), "pairs") as task:
            for example in examples:
                answers.append(session.answer(example.source, self.new_tokens))
                task.advance(note=answers[-1][:40])
        said, wanted = (
            [self._words(each) for each in texts] for texts in (answers, [each.target for each in examples])
        )
        if not all(wanted):
            what = f"the target of pair {[bool(words) for words in wanted].index(False) + 1} has no words"
            raise EvalError(what, where=self.where, remedy="Take it out, or name the right `field`")
        same = [float(ours == theirs) for ours, theirs in zip(said, wanted, strict=True)]
        errors = [word_errors(ours, theirs) for ours, theirs in zip(said, wanted, strict=True)]
        share = len(errors) / sum(map(len, wanted))
        rates = [error * share for error in errors]  # their mean is the rate of all words
        protocol = (
            f"{named(text)}, first {len(examples)} pairs, {self.field} behind {self.input}, greedy answers of up to"
            f" {self.new_tokens} tokens by transformers' generate, compared {COMPARED[self.normalize]}"
        )
        share_right = share_estimate(same, [1] * len(same))
        yield row(self, "exact_match", share_right, protocol, same, pairing="paired_mean")
        wrong_words = mean_estimate(rates, 0.0, math.inf)
        yield row(self, "word_error_rate", wrong_words, protocol, rates, pairing="paired_mean")

    def _words(self, text: str) -> list[str]:
        return (NO_WORD.sub(" ", text.lower()) if self.normalize else text).split()


def word_errors(said: Sequence[str], wanted: Sequence[str]) -> int:
    """Return the fewest words to replace, insert and delete that make one text the other
    (Levenshtein's distance).
    """
    row = list(range(len(wanted) + 1))
    for count, word in enumerate(said, start=1):
        before, row[0] = row[0], count
        for place, other in enumerate(wanted, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != other))
    return row[-1]
