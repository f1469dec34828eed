"""The loop of a training: steps, held-out losses, checkpoints, and every reason to stop."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from optkit.common.out_of_resources import memory_errors
from optkit.errors import StageError
from optkit.progress import Progress, Task
from optkit.training import checkpoints
from optkit.training.data import TrainingData
from optkit.training.objective import Losses, Objective
from optkit.training.optimizer import learning_rate, make_optimizer
from optkit.training.ranks import Ranks, copied, optimizer_state, set_optimizer_state_
from optkit.training.teacher import Teacher
from optkit.training.training_options import Course, TrainingOptions, TrainingResult

WINDOW = 10
"""Steps whose mean loss is compared with that of the first ones."""


@dataclass
class Loop:
    """A training: until the steps or minutes are over or the held-out loss no longer falls."""

    objective: Objective
    data: TrainingData
    teacher: Teacher | None
    options: TrainingOptions
    where: str
    progress: Progress
    place: Path | None = None
    """Directory of checkpoints."""
    digest: str = ""
    """What decides the result: a checkpoint of another digest is not taken."""
    ranks: Ranks = field(default_factory=Ranks)
    """Of several processes the first alone has the weights afterwards."""

    def __post_init__(self) -> None:
        self.device = next(self.objective.parameters()).device
        self.module = self.ranks.prepare(self.objective)
        self.optimizer = make_optimizer(self.objective, self.options.optimizer, self.options.weight_decay)
        self.course = Course()
        self.best: dict[str, Tensor] | None = None
        """The weights of `best_step` on the CPU of the first process; None while they are the
        present ones.
        """
        self._saved_at = self._started = time.perf_counter()
        self._before = 0.0

    def run(self) -> TrainingResult:
        """Train, and leave the weights that were best.

        Raises StageError for a loss that is not finite, diverges or never falls, ResourceError
        without memory or disk space.
        """
        self._resume()
        course, options = self.course, self.options
        with self._explaining_memory(), self.progress.task(self.where, options.steps, "steps") as task:
            task.advance(course.step)
            if options.compile:
                task.advance(0, note="compiling")
                self._compile()
            self._started = self._saved_at = time.perf_counter()
            self._before = course.seconds
            if not course.held_out:
                self._judge()
            task.begin()
            while not course.stopped:
                self._step(task)
                self._end_of_step()
        self._finish()
        return TrainingResult(course, course.step * self._step_tokens)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: parameter for name, parameter in self.objective.named_parameters() if parameter.requires_grad}

    @property
    def _step_tokens(self) -> int:
        return self.options.batch_size * self.options.accumulation * self.data.sequence_length

    def _fraction(self) -> float:
        """Return how much of the training is done, 0 to 1."""
        minutes = self.options.minutes
        return min(
            1.0, max(self.course.step / self.options.steps, self.course.seconds / (60 * minutes) if minutes else 0.0)
        )

    def _compile(self) -> None:
        """Make a pass of each kind, as it comes in the training, and leave everything as it was."""
        started, random = time.perf_counter(), checkpoints.random_state(self.device)
        rows = self.ranks.share(self.data.rows(0, self.options.batch_size))
        with torch.no_grad():
            self._losses(rows)
        self.ranks.forget_gathered(self.module)
        self._losses(rows).total.backward()
        self.optimizer.zero_grad(set_to_none=True)
        checkpoints.set_random_state(random, self.device)
        self.course.compile_seconds += time.perf_counter() - started

    def _step(self, task: Task) -> None:
        options, course = self.options, self.course
        started = time.perf_counter()
        # half a step ahead, so that neither the first nor the last step has a rate of 0
        rate = learning_rate(self._fraction() + 0.5 / options.steps, options.learning_rate, options.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.device)
        first = course.step * options.batch_size * options.accumulation
        for part in range(options.accumulation):
            rows = self.data.rows(first + part * options.batch_size, options.batch_size)
            with self.ranks.accumulating(self.module, last=part + 1 == options.accumulation):
                losses = self._losses(self.ranks.share(rows))
                (losses.total / options.accumulation).backward()
            total += losses.total.detach() / options.accumulation
        norm = self.ranks.complete(nn.utils.clip_grad_norm_(list(self.trainable.values()), options.clip))
        loss = float(self.ranks.mean(total))
        if not (math.isfinite(loss) and math.isfinite(float(norm))):
            raise self._not_finite(self.data.rows(first, options.batch_size * options.accumulation), loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        course.step += 1
        course.curve.append(loss)
        course.rates.append(rate)
        course.step_seconds += time.perf_counter() - started
        self._clock()
        speed = course.step * self._step_tokens / course.step_seconds
        task.advance(note=f"loss {loss:.4f}, {speed:,.0f} tokens/s")
        self._check_divergence()

    def _end_of_step(self) -> None:
        options, course = self.options, self.course
        fraction = self._fraction()
        due = math.floor(fraction * options.evaluations)
        if fraction >= 1.0 or due > course.due:
            course.due = due
            self._judge()
        if fraction >= 1.0:
            course.stopped = (
                "all steps were made" if course.step >= options.steps else f"the {options.minutes:g} minutes were over"
            )
        elif (
            options.patience
            and len([each for each in course.held_out if each["step"] > course.best_step]) >= options.patience
        ):
            course.stopped = f"the held-out loss did not fall {options.patience} times in a row"
        if not course.stopped and self._checkpoint_due():
            self.save()

    def _losses(self, rows: Sequence[int]) -> Losses:
        tokens = self.data.tokens[list(rows)].to(self.device)
        targets = self.teacher.targets(rows, tokens) if self.teacher else None
        losses: Losses = self.module(tokens, targets)
        return losses

    @torch.no_grad()
    def _judge(self) -> None:
        """Note the held-out losses, and keep the weights if they are the least so far."""
        course, size = self.course, self.options.batch_size
        sums: dict[str, float] = {}
        for start in range(0, len(self.data.held_out), size):
            among = self.data.held_out[start : start + size]
            rows = self.ranks.share(among)
            losses = self._losses(rows or among[:1])  # every process takes part in every forward pass
            for name, value in {"total": losses.total, **losses.parts}.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(rows)
        self.ranks.forget_gathered(self.module)
        shares = self.ranks.gather(sums)
        means = {name: sum(each[name] for each in shares) / len(self.data.held_out) for name in sums}
        if not math.isfinite(means["total"]):
            raise self._not_finite(self.data.held_out, means["total"])
        least = min((each["total"] for each in course.held_out), default=math.inf)
        course.held_out.append({"step": course.step, **means})
        if means["total"] < least:
            course.best_step = course.step
            self.best = copied(self.trainable, self.ranks)
        self._clock()

    def _clock(self) -> None:
        self.course.seconds = self.ranks.tell(self._before + time.perf_counter() - self._started)

    def _checkpoint_due(self) -> bool:
        options = self.options
        if self.place is None:
            return False
        if options.checkpoint_steps and self.course.step % options.checkpoint_steps == 0:
            return True
        waited = self.ranks.tell(time.perf_counter() - self._saved_at)
        return bool(options.checkpoint_minutes and waited >= 60 * options.checkpoint_minutes)

    def save(self) -> None:
        """Write a checkpoint. Raises ResourceError on a full disk; the one before stays good."""
        if self.place is None:
            return
        best = self.best if self.course.best_step != self.course.step else None
        weights = self.trainable if self.ranks.count == 1 else copied(self.trainable, self.ranks)
        state = optimizer_state(self.optimizer, self.ranks)
        if self.ranks.first:
            saved = checkpoints.Saved(asdict(self.course), weights, best, state, checkpoints.random_state(self.device))
            checkpoints.save(self.place, self.course.step, self.digest, saved)
        self._saved_at = time.perf_counter()

    @torch.no_grad()
    def _resume(self) -> None:
        saved = checkpoints.load(self.place, self.digest) if self.place else None
        if saved is None:
            return
        self.course = Course(**saved.facts)
        self.course.resumed.append(self.course.step)
        for name, parameter in self.trainable.items():
            parameter.copy_(self.ranks.part_of(parameter, saved.weights[name]))
        self.best = (
            dict(saved.best or {name: tensor.clone() for name, tensor in saved.weights.items()})
            if self.ranks.first
            else {}
        )
        set_optimizer_state_(self.optimizer, saved.optimizer, self.ranks)
        checkpoints.set_random_state(saved.random, self.device)
        self.progress.say(f"{self.where}: goes on after step {self.course.step:,}, from the checkpoint in {self.place}")

    @torch.no_grad()
    def _finish(self) -> None:
        """Leave the best weights; raises StageError if those before the first step were."""
        first, last = self.course.held_out[0], self.course.held_out[-1]
        if self.course.best_step == 0:
            raise StageError(
                f"the held-out loss never fell below its start: {first['total']:.4f} before, {last['total']:.4f} after"
                f" {self.course.step:,} steps",
                where=self.where,
                why=f"It got worse with a learning rate of {self.options.learning_rate:g}",
                remedy="Lower `learning_rate`, or give it more tokens",
            )
        if self.best is not None and self.course.best_step != self.course.step:
            for name, parameter in self.trainable.items():
                self.ranks.hand_out_(parameter, self.best.get(name))
        self.ranks.collect_(self.objective)

    def _check_divergence(self) -> None:
        curve, options = self.course.curve, self.options
        if len(curve) < 2 * WINDOW or self._fraction() < options.warmup:
            return
        # a few texts may have far larger losses
        start, now = statistics.median(curve[:WINDOW]), statistics.median(curve[-WINDOW:])
        if now > options.diverged * start:
            raise StageError(
                f"the training diverges: the loss was {start:.4f} at the start and is {now:.4f} "
                f"at step {self.course.step:,}",
                where=self.where,
                why=f"Steps with a learning rate of {options.learning_rate:g} are too large",
                remedy=f"Lower `learning_rate`, e.g. to {options.learning_rate / 5:.1g}",
            )

    def _not_finite(self, rows: Sequence[int], loss: float) -> StageError:
        """Return the error for a loss or gradient that is NaN or Inf.
        It names the texts that make it so alone.
        """
        with torch.no_grad():
            alone = [row for row in rows if not bool(self._losses([row]).total.isfinite())]
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite"
        named = "; ".join(self.data.places[row] for row in (alone or rows)[:3]) + (
            "; ..." if len(alone or rows) > 3 else ""
        )
        return StageError(
            f"{what} at step {self.course.step + 1:,}, on {len(alone or rows):,} of {len(rows):,} sequences ({named})",
            where=self.where,
            why="" if alone else "Each of them alone gives a finite loss",
            remedy="Lower `learning_rate`, set `precision: float32`, or look at that text; the last checkpoint is kept",
        )

    def _explaining_memory(self) -> AbstractContextManager[None]:
        remedy = "Lower `batch_size` and raise `accumulation` by as much, or set `gradient_checkpointing: true`"
        return memory_errors(
            lambda _: f"out of memory at step {self.course.step + 1:,} on {self.device}", self.where, remedy
        )
