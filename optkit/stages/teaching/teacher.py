"""Who teaches a stage that trains, and what it says.
There are fields, checks, and the teacher itself, live or from its kept answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from optkit.common.field_types import Amount, Count, Factor, NonNegative, Tokens
from optkit.common.frozen import Frozen, digest
from optkit.errors import StageError
from optkit.model.shape import ModelShape
from optkit.model.text_config import text_config
from optkit.source.calibration import load_tokenizer
from optkit.source.models import ModelSource, model_shape, pin_model, require_directory
from optkit.source.places import pin_and_remember
from optkit.source.tokenizer import refuse_other_tokens
from optkit.stage import Context, Transform
from optkit.training.shared_answers import SharedPlace, shared_place

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.training.data import TrainingData
    from optkit.training.objective import LossWeights
    from optkit.training.teacher import LiveTeacher, Teacher


class Generated(Frozen):
    """Text that the teacher writes."""

    tokens: Tokens
    """How much it writes, in tokens; whole sequences."""
    temperature: Factor = 1.0
    """How freely it chooses: 1 draws tokens as likely as they are to it."""
    prompt_tokens: Amount = 4
    """Tokens of the texts that each of its sequences begins with; 0 begins with the tokenizer's
    first special token.
    """

    def sequences(self, length: int) -> int:
        """Return how many sequences of so many tokens it writes."""
        return max(1, self.tokens // length)


class StageWithTeacher(Transform):
    """What a student is told, and by whom."""

    finds_parts: ClassVar[bool] = True

    teacher: ModelSource | None = None
    """Whom the student learns from: a model with the same vocabulary. Left out, the model that the
    recipe starts from.
    """
    top_k: Count | None = None
    """Keep so many of the teacher's likeliest tokens for each position in the store (all others are
    one outcome together). So it runs once for all epochs and students. Left out, it runs beside the
    student and tells all.
    """
    generated: Generated | None = None
    """Train on text that the teacher writes, beside the texts; only these are held out."""
    divergence: NonNegative = 1.0
    """Weight of the loss KL(teacher || student) of the next token."""
    cross_entropy: NonNegative = 0.0
    """Weight of the loss -log p(next token of the text)."""
    hidden: NonNegative = 0.0
    """Weight of the distance of hidden states, block by block; a learned matrix stands between
    different widths.
    """
    attention: NonNegative = 0.0
    """Weight of the divergence of attention, block by block."""
    temperature: Factor = 1.0
    """Softens both sides of the divergence."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if not self.divergence and not self.cross_entropy:
            raise ValueError("divergence and cross_entropy are both 0. Give one of them a weight.")
        if self.top_k and (self.hidden or self.attention):
            raise ValueError(
                "hidden and attention need the teacher beside the student. Leave out top_k, or set them to 0."
            )
        if self.top_k and not self.divergence:
            raise ValueError("top_k is for the divergence, whose weight is 0. Leave it out.")
        return self

    @property
    def _has_teacher(self) -> bool:
        return bool(self.divergence or self.hidden or self.attention)

    def pinned(self, data: Path | None) -> Self:
        """Return the stage with the teacher's revision filled in.
        Raises SourceError if there is no such model.
        """
        return self.model_copy(update={"teacher": pin_and_remember(self.teacher)}) if self.teacher else self

    def _check_teacher(self, shape: ModelShape, origin: ModelShape) -> None:
        """Raise StageError for a teacher that is missing, is quantized or has another vocabulary.
        More of its tokens than that are refused too.

        `origin` is the model that the recipe starts from, the teacher if none is named.
        """
        vocabulary = text_config(shape.config).get("vocab_size")
        if self.top_k and vocabulary and self.top_k >= vocabulary:
            raise StageError(
                f"top_k {self.top_k:,} of {vocabulary:,} tokens is all", where=self.kind, remedy="Leave out `top_k`"
            )
        if not self._has_teacher and not self.generated:
            return
        if self.teacher is None:
            if origin.config.get("quantization_config"):
                raise StageError(
                    "the model that the recipe starts from would be the teacher, and is quantized",
                    where=self.kind,
                    why="A teacher has float weights",
                    remedy="Name one: `teacher: DIRECTORY`",
                )
            return
        theirs = self.teacher_shape()
        if theirs.config.get("quantization_config"):
            raise StageError(
                f"the teacher {self.teacher.name} is quantized", where=self.kind, remedy="Name its float weights"
            )
        here = text_config(theirs.config).get("vocab_size")
        if here != vocabulary:
            raise StageError(
                f"the teacher {self.teacher.name} has a vocabulary of {here} tokens and the "
                f"student one of {vocabulary}",
                where=self.kind,
                why="What it says would be about other tokens",
                remedy="Take a teacher of the same family",
            )

    def teacher_shape(self) -> ModelShape:
        assert self.teacher
        return model_shape(self.teacher, require_directory(self.teacher, "teacher", self.kind))

    def _teacher_directory(self, source: Path, context: Context) -> Path:
        """Return the teacher's directory.
        Raises StageError if there is none, or its tokenizer is another one than the student's.
        """
        directory = require_directory(self.teacher, "teacher", self.kind) if self.teacher else context.origin
        if directory is None:
            raise StageError("there is no teacher", where=self.kind, remedy="Name one: `teacher: DIRECTORY`")
        refuse_other_tokens("teacher", directory, "student", source, self.kind, "Take a teacher of the same family")
        return directory

    def _live_teacher(self, source: Path, context: Context) -> LiveTeacher:
        import torch

        from optkit.training.teacher import LiveTeacher

        return LiveTeacher(
            self._teacher_directory(source, context),
            context.device,
            torch.bfloat16 if getattr(self, "precision", "float32") == "bfloat16" else torch.float32,
            hidden=self.hidden > 0,
            attention=self.attention > 0,
            trust_remote_code=self.teacher.trust_remote_code if self.teacher else context.trust_remote_code,
        )

    @contextmanager
    def _teacher(
        self, source: Path, context: Context, data: TrainingData, rows: list[int], batch_size: int
    ) -> Iterator[Teacher | None]:
        """Return who is asked during the training.
        With `top_k` everything that will be asked about these rows is asked now.
        """
        if not self._has_teacher or self.top_k is None:
            yield self._live_teacher(source, context) if self._has_teacher else None
            return
        from optkit.training.answers import KnownTeacher

        about = self._about(source, context) | {
            "top_k": self.top_k,
            "temperature": self.temperature,
            "tokens": data.tokens_digest(),
        }
        with _shared(context, "answers", about) as shared:
            teacher = KnownTeacher(shared)
            teacher.learn(
                rows,
                data.tokens,
                lambda: self._live_teacher(source, context),
                self.top_k,
                self.temperature,
                batch_size,
                context.progress,
            )
            yield teacher

    def _with_generated(self, data: TrainingData, source: Path, context: Context) -> TrainingData:
        """Return the data with what the teacher writes beside it."""
        if self.generated is None:
            return data
        from optkit.training.generated import generated, sequences_at_once

        at_once = sequences_at_once(context.device, data.sequence_length)
        prompts = self._prompts(self.generated, data, source, context)
        about = (
            self._about(source, context)
            | self.generated.model_dump()
            | {"seed": context.seed, "length": data.sequence_length}
        )
        about |= {"prompts": data.digest(), "at_once": at_once}
        with _shared(context, "generated", about) as shared:
            tokens = generated(
                lambda: self._live_teacher(source, context).model,
                prompts,
                data.sequence_length,
                self.generated.temperature,
                context.seed,
                at_once,
                shared,
                context.progress,
            )
        return data.extended(tokens, "text that the teacher wrote")

    def _prompts(self, asked: Generated, data: TrainingData, source: Path, context: Context) -> Tensor:
        """Return how each generated sequence begins, int64 [sequences, tokens of a prompt]."""
        import torch

        count = asked.sequences(data.sequence_length)
        if asked.prompt_tokens:
            rows = torch.tensor(data.training)
            starts = torch.arange(
                data.lead, data.sequence_length - asked.prompt_tokens + 1, max(1, asked.prompt_tokens)
            )
            pairs = torch.randperm(
                len(rows) * len(starts), generator=torch.Generator().manual_seed(context.seed)
            ).repeat(-(-count // (len(rows) * len(starts))))[:count]
            columns = starts[pairs % len(starts), None] + torch.arange(asked.prompt_tokens)
            chosen = data.tokens[rows[pairs // len(starts)], :]
            return torch.cat([chosen[:, : data.lead], chosen.gather(1, columns)], dim=1)
        tokenizer = load_tokenizer(source, context.trust_remote_code)
        first = next((each for each in (tokenizer.bos_token_id, tokenizer.eos_token_id) if each is not None), None)
        if first is None:
            raise StageError(
                "the tokenizer has no special token to begin with", where=self.kind, remedy="Set `prompt_tokens: 4`"
            )
        return torch.full((count, 1), first)

    def _about(self, source: Path, context: Context) -> dict[str, Any]:
        directory = self._teacher_directory(source, context)
        pinned = self.teacher if self.teacher and self.teacher.revision else pin_model(ModelSource(name=str(directory)))
        precision = getattr(self, "precision", "float32")
        return {
            "teacher": self.teacher.name if self.teacher else "",
            "revision": pinned.revision,
            "precision": precision,
        }

    def _weights(self) -> LossWeights:
        from optkit.training.objective import LossWeights

        return LossWeights(self.divergence, self.cross_entropy, self.hidden, self.attention, self.temperature)


@contextmanager
def _shared(context: Context, what: str, about: dict[str, Any]) -> Iterator[SharedPlace]:
    """Hold a directory beside the workspaces of all steps, for what other students can use too.
    Without a store it is one of its own.
    """
    with ExitStack() as stack:
        root = (
            context.workspace.parent
            if context.workspace
            else Path(stack.enter_context(TemporaryDirectory(prefix="optkit-")))
        )
        yield stack.enter_context(shared_place(root / f"{what}-{digest(about)}", {"what": what, **about}))
