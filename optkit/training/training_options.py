"""How a training is to be made, how far it has come, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optkit.training.optimizer import OptimizerName


@dataclass(frozen=True)
class TrainingOptions:
    """How to train; what is minimized is the objective's business."""

    steps: int
    """Optimizer steps, if `minutes` does not end them before."""
    batch_size: int = 8
    """Sequences of a forward pass."""
    accumulation: int = 1
    """Forward passes of a step."""
    learning_rate: float = 1e-4
    warmup: float = 0.05
    """Share of the training in which the learning rate rises."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    optimizer: OptimizerName = "adamw"
    minutes: float | None = None
    """The learning rate comes down as the first of `steps` and `minutes` runs out."""
    evaluations: int = 10
    """How often the held-out sequences are judged, besides before the first step."""
    patience: int | None = 3
    """Stop after so many of these in a row without a new least loss; None: never."""
    checkpoint_minutes: float | None = 5.0
    checkpoint_steps: int | None = None
    compile: bool = False
    """Whether the first passes compile; they are made, and thrown away, before any time counts."""
    diverged: float = 3.0
    """Stop when the loss is so many times what it was at the start, after the warm-up."""


@dataclass
class Course:
    """How far a training has come; JSON values."""

    step: int = 0
    seconds: float = 0.0
    """Of the whole loop, over all runs that it took."""
    step_seconds: float = 0.0
    """Of the steps alone, without held-out losses and checkpoints."""
    compile_seconds: float = 0.0
    """In front of the loop, in neither of these."""
    curve: list[float] = field(default_factory=list)
    """The loss of each step."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each step."""
    held_out: list[dict[str, float]] = field(default_factory=list)
    """`step`, `total` and each loss by its name, in order."""
    best_step: int = 0
    due: int = 0
    """How many of the evaluations the training has come past; if a step took long, one judgement
    stands for several.
    """
    stopped: str = ""
    resumed: list[int] = field(default_factory=list)
    """Steps at which a later run went on."""


@dataclass(frozen=True)
class TrainingResult:
    """What a training came to; the objective holds the weights of `best_step` afterwards."""

    course: Course
    tokens: int
    """Tokens trained on, repeated ones counted again."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.course.step_seconds if self.course.step_seconds else 0.0

    @property
    def first(self) -> dict[str, float]:
        """Held-out losses before the first step."""
        return self.course.held_out[0]

    @property
    def best(self) -> dict[str, float]:
        """The least held-out losses."""
        return next(each for each in self.course.held_out if each["step"] == self.course.best_step)

    def details(self) -> dict[str, Any]:
        """Return what a report says about a training, as JSON values of bounded length."""
        return {
            "steps": self.course.step,
            "tokens": self.tokens,
            "seconds": round(self.course.seconds, 1),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "compile_seconds": round(self.course.compile_seconds, 1),
            "stopped": self.course.stopped,
            "best_step": self.course.best_step,
            "held_out_before": self.first,
            "held_out_after": self.best,
            "held_out": self.course.held_out,
            "resumed_at": self.course.resumed,
        }
