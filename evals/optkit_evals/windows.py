"""The tokens that a text eval measures on: a joined text, cut into windows that do not overlap.
The protocol is that of the GPTQ paper.

    text    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9            window 4
    window  t0 t1 t2 t3   t4 t5 t6 t7   (t8 t9 dropped)
    counted    t1 t2 t3      t5 t6 t7                     the first token of a window has no context

https://arxiv.org/abs/2210.17323, https://github.com/IST-DASLab/gptq
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from optkit.common.field_types import SequenceLength, Several
from optkit.errors import EvalError
from optkit.measure import Answering, EvalContext, SeeingSession, Session
from optkit.model.session_memory import SLICE_BYTES
from optkit.source.conditioned import ConditionedText
from optkit.source.cut_text import apart, family_that_needs_bos
from optkit.source.images import ImageText, Prompts
from optkit.source.lineage import DRAFT, shared_with
from optkit.source.text_place import TextPlace
from optkit.source.texts import TextSource
from optkit.source.token_counts import TokenCounts
from optkit.source.training_text import TrainingText

if TYPE_CHECKING:
    from torch import Tensor


FEWEST = 2
"""Windows; one would have no error bar."""
MOST_CHECKED = 1 << 20
"""Tokens of a text that is measured whole whose ids are compared with the vocabulary before
anything runs.
"""


def slices(positions: int, vocabulary: int) -> Iterator[slice]:
    """Yield neighbouring positions, about equally many at once.
    Their float32 logits have at most `SLICE_BYTES`.
    """
    count = -(-positions // max(1, SLICE_BYTES // (4 * vocabulary)))
    for index in range(count):
        yield slice(positions * index // count, positions * (index + 1) // count)


@dataclass(frozen=True)
class Windows:
    """Equal windows of a text, or the targets of pairs."""

    tokens: Tensor
    """int64 [windows, window]; targets are padded with -1 at their end."""
    protocol: str
    """Data set, split, revision, window, BOS, tokens counted and a digest of the token ids."""
    inputs: tuple[str, ...] = ()
    """What an encoder-decoder is given for each; none of a text alone."""

    def seen_by(self, session: Any) -> Iterator[tuple[Answering, Tensor]]:
        """Yield each window, and what gives its logits: the session, behind an input if there is one."""
        for index, window in enumerate(self.tokens):
            yield (session.given(self.inputs[index]) if self.inputs else session), window[window >= 0]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.tokens)


@dataclass(eq=False)
class Seeing:
    """A session behind a prompt with images, which gives the logits of the answer."""

    session: Any
    directory: Path
    device: str
    inputs: Mapping[str, Tensor]
    """What the model is called with, the answer's tokens too."""

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [1, 1 + answer], as `Answers` yields them -> float32 [1, 1 + answer, vocabulary]."""
        found: Tensor = self.session.prompt_logits(self.inputs)[:, -tokens.shape[1] :]
        return found

    def sees_what(self, other: Seeing) -> bool:
        """Say whether two models are given the same pixels and the same question."""
        pairs = [(value, other.inputs.get(name)) for name, value in self.inputs.items()]
        return len(self.inputs) == len(other.inputs) and all(b is not None and a.equal(b) for a, b in pairs)


@dataclass(frozen=True)
class Answers:
    """Prompts with images, measured on the last message of each."""

    prompts: Prompts
    named: str
    """What the protocol begins with."""
    _counted: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.prompts)

    def seen_by(self, session: Any) -> Iterator[tuple[Answering, Tensor]]:
        """Yield what gives the logits of each answer, and the token in front of it with its own."""
        for pair in self.prompts.pairs:
            inputs = self.prompts.inputs(pair)
            self._counted.append(inputs["input_ids"][0, self.prompts.answer(pair, inputs) - 1 :])
            yield Seeing(session, session.directory, session.device, inputs), self._counted[-1]

    @property
    def protocol(self) -> str:
        """What was measured, known once all of it was: tokens counted and a digest of their ids."""
        ids = hashlib.sha256(b"".join(each.numpy().tobytes() for each in self._counted)).hexdigest()[:12]
        images = sum(len(pair.pictures) for pair in self.prompts.pairs)
        return (
            f"{self.named}, first {len(self)} prompts with {images} images by the model's chat template, pixels by"
            f" {type(self.prompts.processor.image_processor).__name__}, answers alike in weight,"
            f" {sum(len(each) - 1 for each in self._counted)} tokens counted, token ids {ids}"
        )


class WindowedText(ConditionedText):
    """A text and how it is cut into windows, or pairs of an input and a target."""

    sets_length: ClassVar[tuple[str, ...]] = ("window",)
    asks_draft: ClassVar[bool] = False
    """Texts that shaped a draft are not measured on either."""

    window: SequenceLength = 2048
    """Tokens of a window; of pairs, those of a target at most, with what the decoder begins with."""
    windows: Several | None = None
    """Windows (or pairs) to measure, from the start of the text; all of them when null. One would
    have no error bar.
    """

    def longest_sequence(self) -> int:
        """Return the tokens of a window."""
        return self.window

    def check_texts(self, place: TextPlace) -> None:
        """Refuse a tokenizer that cannot be opened or is another model's, and too few windows."""
        self.check_task(place)
        counts = TokenCounts.of(place)
        if self.input is not None:
            if self.is_local(place.data):
                self.first_examples(place.data, self.windows)
            return
        text = TrainingText.model_validate(
            {**self.identity(), "field": self.field, "packing": "joined", "bos": self.bos}
        )
        least = self.windows or FEWEST
        found = counts.enough_sequences((text,), self.window, least)
        if found is not None and found < least:
            raise self._too_short(f"{found:,} windows of {self.window:,} tokens and {least:,} are needed")
        counts.check_ids(text, self.windows * self.window if self.windows else MOST_CHECKED, place.vocabulary)

    def _too_short(self, told: str) -> EvalError:
        remedy = "Lower windows or window, or take a longer text"
        return EvalError(f"the text has {told}", where=self.where, remedy=remedy)

    def cut(self, session: Session, context: EvalContext) -> Windows:
        """Return the windows.
        Raises EvalError if the text was calibrated on, is too short, or the model's positions are
        too few.
        """
        text = self if self.revision else self.pinned(context.data)
        self._check_window(session)
        if text.input is not None:
            return text._targets(session, context)
        joined = text.joined(context.data)
        tokenizer = getattr(session, "tokenizer", None)
        bos_id = getattr(tokenizer, "bos_token_id", None)
        stream = self.stream(lambda part: session.encode(part).tolist(), joined, bos_id)
        room, least = stream.room(self.window), self.windows or FEWEST
        if len(stream.body) < least * room:
            needed = f"{least} windows of {self.window} need {least * room:,}"
            raise self._too_short(f"{len(stream.body):,} tokens and {needed}")
        count = self.windows or stream.count(self.window)
        measured = joined[: math.ceil(len(joined) * count * room / len(stream.body))]
        refuse_calibrated(text, [measured], context, self.asks_draft)
        bos = self._where_bos_stands(session, bool(stream.lead))
        if (kind := family_that_needs_bos(session.directory)) and not stream.lead:
            context.warn(
                f"{self.where}: windows of a {kind} model begin without BOS, which its family needs: its "
                "numbers are worse than the model is. Set bos: window"
            )
        import torch

        tokens = torch.tensor([stream.window(index * room, self.window) for index in range(count)], dtype=torch.int64)
        ids = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:12]
        return Windows(
            tokens=tokens,
            protocol=f"{named(text)}, documents joined, first {count} windows of {self.window} tokens without overlap,"
            f" {bos}, {count * (self.window - 1)} tokens counted, token ids {ids}",
        )

    def _targets(self, session: Any, context: EvalContext) -> Windows:
        """Return the targets of the first pairs."""
        import torch

        taken = self.first_examples(context.data, self.windows)
        refuse_calibrated(self, [pair.target for pair in taken], context, self.asks_draft)
        tokens = [session.target(pair.target, self.window) for pair in taken]
        if empty := next((index for index, each in enumerate(tokens, start=1) if len(each) < FEWEST), 0):
            raise EvalError(f"the target of pair {empty} is empty", where=self.where, why="No token of it is predicted")
        ids = hashlib.sha256(b"".join(each.numpy().tobytes() for each in tokens)).hexdigest()[:12]
        return Windows(
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1),
            f"{named(self)}, first {len(taken)} pairs, {self.field} behind {self.input}, targets of up to {self.window}"
            f" tokens alike in weight, {sum(len(each) - 1 for each in tokens)} tokens counted, token ids {ids}",
            tuple(pair.source for pair in taken),
        )

    def _check_window(self, session: Session) -> None:
        if self.window > session.positions:
            what = f"a window of {self.window} tokens is longer than the model's {session.positions} positions"
            why = "The model was not built for it, so the number would mean nothing"
            remedy = f"Set window to {session.positions} or less"
            raise EvalError(what, where=self.where, why=why, remedy=remedy)

    def _where_bos_stands(self, session: Session, led: bool) -> str:
        if led:
            return "BOS in each window"
        if not apart(lambda part: session.encode(part).tolist(), "a")[0]:
            return "tokenizer adds no BOS"
        return "BOS once" if self.bos == "text" else "no BOS"


class PromptedText(ImageText, WindowedText):
    """A text cut into windows, or prompts with images, each measured on its answer.
    `windows` counts prompts then, and `window` is the most tokens that one may have.
    """

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        """Return what keeps numbers of prompts with images apart from those of text."""
        return ({"prompts": "images"},) if self.images is not None else ({},)

    def check_texts(self, place: TextPlace) -> None:
        """Refuse what `WindowedText.check_texts` refuses, and images that cannot be read."""
        if self.images is None:
            super().check_texts(place)
        else:
            self.check_images(place, self.windows, ("window", self.window))

    def measured_by(self, session: Any, context: EvalContext) -> Windows | Answers:
        """Return what is measured.
        Raises EvalError as `cut` does, and for images that the model does not take; SourceError as
        `ImageText.prompts_of` does.
        """
        if self.images is None:
            return self.cut(session, context)
        sees = isinstance(session, SeeingSession) and session.takes_images
        if not sees:
            remedy = "Leave out `images`, which reads text"
            raise EvalError("the opened model takes no images", where=str(session.directory), remedy=remedy)
        self._check_window(session)
        text = self if self.revision else self.pinned(context.data)
        limit = ("window", self.window)
        prompts = text.prompts_of(session.directory, context.data, session.trust_remote_code, self.windows, limit)
        if len(prompts) < FEWEST:
            raise self._too_short(f"{len(prompts)} records and {FEWEST} are needed")
        refuse_calibrated(text, [pair.text for pair in prompts.pairs], context, self.asks_draft)
        return Answers(prompts, named(text))


def refuse_calibrated(
    text: TextSource, passages: Sequence[str], context: EvalContext, asks_draft: bool = False
) -> None:
    """Raise EvalError if the weights were calibrated on the passages that are measured, or the draft
    if the eval asks it. They are known by the text's name or by what stands in it.
    """
    lineage = [each for each in context.calibrated_on if asks_draft or DRAFT not in each]
    if found := shared_with(text, passages, lineage):
        why, remedy = "A number measured on the same text would flatter it", "Measure on another split or data set"
        raise EvalError(found, where=text.where, why=why, remedy=remedy)


def require_baseline(context: EvalContext, where: str) -> Any:
    """Return the unmodified model; raises EvalError if there is none."""
    if context.baseline is None:
        why = "It measures how far a model moved from another one"
        raise EvalError("there is no baseline", where=where, why=why)
    return context.baseline


def other_tokens(where: str) -> EvalError:
    """Return the error of a model that reads the text as other tokens than the baseline."""
    what, why = "the model and the baseline read the text as different tokens", "Their tokenizers differ"
    return EvalError(what, where=where, why=why, remedy="Give both the same tokenizer files")


def named(text: TextSource) -> str:
    """Return the data set, split and revision of a text, which its protocol begins with."""
    return f"{text.dataset} {text.split} (revision {short_revision(text.revision or '')})"


def short_revision(revision: str) -> str:
    """Return the first 12 digits of a commit hash or digest, which name it well enough to read."""
    kind, _, digits = revision.rpartition(":")
    return f"{kind}:{digits[:12]}" if kind else digits[:12]
