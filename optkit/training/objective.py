"""What a training minimizes, as one module: the student, the losses and their weights.

Logits are computed for some positions at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optkit.training.logits_in_parts import TwoParts
from optkit.training.losses import IGNORED, attention_divergence, cross_entropy, hidden_distance
from optkit.training.predicted_memory import logits_at_once


@dataclass(frozen=True)
class LossWeights:
    """How much each loss counts; a loss of weight 0 is not computed."""

    divergence: float = 1.0
    cross_entropy: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    temperature: float = 1.0


class Targets(Protocol):
    """What a teacher says about some sequences, b * s positions one after the other."""

    hidden_states: Sequence[Tensor]
    """Of the embedding and of each block, float [b, s, teacher's width]; empty if they were not
    asked for.
    """
    attentions: Sequence[Tensor]
    """Of each block, float [b, heads, s, s]; empty if they were not asked for."""

    def divergence(self, logits: Tensor, positions: slice, temperature: float) -> Tensor:
        """Return the sum of T^2 KL(teacher || student) over positions.
        The student's logits are float [positions, v].
        """


@dataclass(frozen=True)
class Losses:
    """The losses of a batch."""

    total: Tensor
    """The weighted sum, a scalar with a gradient."""
    parts: dict[str, Tensor]
    """Each loss by its name before its weight: means over positions, in nats for divergence and
    cross-entropy.
    """


class Objective(nn.Module):
    """Losses of a student on tokens. Its parameters are the student's, and the projections between
    widths that hidden losses need.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weights: LossWeights,
        teacher_width: int | None = None,
        precision: torch.dtype = torch.float32,
    ) -> None:
        """Prepare the losses; `precision` is what matrices are multiplied in (autocast).

        Raises SourceError for a student that cannot be taken apart into decoder and output layer.
        """
        super().__init__()
        self.student, self.weights, self.precision = student, weights, precision
        self.parts = TwoParts(student)
        if weights.attention:
            student.set_attn_implementation("eager")
        self.projections = self._projections(teacher_width)

    def forward(self, tokens: Tensor, targets: Targets | None) -> Losses:
        """Return the losses of int64 [b, s] on the student's device."""
        weights, device = self.weights, tokens.device.type
        with torch.autocast(device, dtype=self.precision, enabled=self.precision is not torch.float32):
            options = {"output_hidden_states": True} if weights.hidden else {}
            options |= {"output_attentions": True} if weights.attention else {}
            output = self.parts.run(tokens, **options)
            total, parts = self._of_logits(output.last_hidden_state, tokens, targets)
            if weights.hidden and targets is not None:
                parts["hidden"] = self._hidden(output.hidden_states[1:], targets.hidden_states[1:])
                total = total + weights.hidden * parts["hidden"]
            if weights.attention and targets is not None:
                pairs = _paired(output.attentions, targets.attentions)
                parts["attention"] = torch.stack([attention_divergence(*pair) for pair in pairs]).mean()
                total = total + weights.attention * parts["attention"]
        return Losses(total, {name: part.detach() for name, part in parts.items()})

    def _of_logits(self, hidden: Tensor, tokens: Tensor, targets: Targets | None) -> tuple[Tensor, dict[str, Tensor]]:
        weights = self.weights
        following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], dim=1).flatten()
        count, told = tokens.numel(), tokens.numel() - len(tokens)
        judging = not torch.is_grad_enabled()
        names = ["divergence"] * (weights.divergence > 0 and targets is not None)
        names += ["cross_entropy"] * (weights.cross_entropy > 0 or judging)

        def compute(part: Tensor, positions: slice) -> tuple[Tensor, Tensor]:
            logits = self.parts.logits(part[None])[0]
            found = {}
            if "divergence" in names and targets is not None:
                found["divergence"] = targets.divergence(logits, positions, weights.temperature) / count
            if "cross_entropy" in names:
                found["cross_entropy"] = cross_entropy(logits, following[positions]) / told
            scale = {"divergence": weights.divergence, "cross_entropy": weights.cross_entropy}
            total = torch.stack([found[name] * scale[name] for name in names]).sum()
            return total, torch.stack([found[name].detach() for name in names])

        vocabulary = self.student.get_output_embeddings().weight.shape[0]
        at_once = logits_at_once(tokens.device.type, vocabulary)
        total, values = in_parts(compute, hidden.flatten(0, 1), at_once, self.parts.head_parameters)
        return total, dict(zip(names, values, strict=True))

    def _hidden(self, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
        projected = (
            [project(state) for project, state in zip(self.projections, ours, strict=True)]
            if len(self.projections)
            else ours
        )
        return torch.stack([hidden_distance(*pair) for pair in _paired(projected, theirs)]).mean()

    def _projections(self, teacher_width: int | None) -> nn.ModuleList:
        """Return a matrix for each block from the student's width to the teacher's, if they differ."""
        config = self.student.config.get_text_config(decoder=True)
        width = int(config.hidden_size)
        if not self.weights.hidden or teacher_width in (None, width):
            return nn.ModuleList()
        made = [nn.Linear(width, int(teacher_width or 0), bias=False) for _ in range(int(config.num_hidden_layers))]
        return nn.ModuleList(made).to(self.student.device)


def _paired(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each of the student's blocks with the teacher's at the same share of the depth."""
    return [(each, theirs[round((index + 1) * len(theirs) / len(ours)) - 1]) for index, each in enumerate(ours)]


Compute = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def in_parts(
    compute: Compute, hidden: Tensor, at_once: int, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Return the sums of what `compute` returns for float [n, h], `at_once` positions at a time.
    They are a loss with a gradient, and numbers.

    If a gradient is wanted it is taken right after each part, so that only one part's logits are
    ever held. `parameters` are all trainable ones that `compute` uses.
    """
    if not torch.is_grad_enabled():
        sums = [compute(part, positions) for part, positions in _parts(hidden, at_once)]
        return torch.stack([total for total, _ in sums]).sum(), torch.stack([values for _, values in sums]).sum(0)
    total, values = _InParts.apply(compute, at_once, hidden, *parameters)
    return total, values


def _parts(hidden: Tensor, at_once: int) -> list[tuple[Tensor, slice]]:
    starts = range(0, len(hidden), at_once)
    return [(hidden[start : start + at_once], slice(start, min(start + at_once, len(hidden)))) for start in starts]


class _InParts(torch.autograd.Function):
    """Computes the gradients together with the value, part by part."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, at_once: int, hidden: Tensor, *parameters: nn.Parameter
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(parameters)
        totals, numbers = [], []
        for part, positions in _parts(hidden, at_once):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                total, values = compute(leaf, positions)
                found = torch.autograd.grad(total, [leaf, *parameters], allow_unused=True)
            gradient[positions] = found[0]
            for index, each in enumerate(found[1:]):
                earlier = sums[index]
                sums[index] = each if earlier is None else earlier if each is None else earlier.add_(each)
            totals.append(total.detach())
            numbers.append(values)
        ctx.gradients = (gradient, *sums)
        values = torch.stack(numbers).sum(0)
        ctx.mark_non_differentiable(values)
        return torch.stack(totals).sum(), values

    @staticmethod
    def backward(ctx: Any, outer: Tensor, _values: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        return (None, None, *(None if each is None else each.mul_(outer) for each in gradients))
