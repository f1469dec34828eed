"""What a student is told: cross-entropy of the text, and divergence from a teacher.
Distances of hidden states and of attention may be added.

All of them return a sum over positions, so that positions can be taken in parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""The target of a position that nothing follows."""
LEAST = -60.0
"""A log-probability below this one is taken for it: denormal numbers would make a CPU crawl."""
SMALLEST_REST = 1e-6
"""A smaller probability of everything outside the top k is taken for this one."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log p(target) over positions.
    logits: float [n, v], targets: int64 [n], `IGNORED` if there is none.
    """
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def divergence(logits: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the sum of T^2 KL(teacher || student) over positions.
    Both are float [n, v], softened by the temperature T.

    T^2 keeps the size of the gradients (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). The
    teacher gets no gradient.
    """
    with torch.autocast(logits.device.type, enabled=False):  # which takes 16 bits for the sums over tokens
        total: Tensor = _Divergence.apply(logits, teacher, temperature)
    return total


class _Divergence(torch.autograd.Function):
    """The gradient comes with the value: T (softmax(student / T) - softmax(teacher / T)).
    Three float32 [n, v] are held.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        ours, theirs = (_log_softmax(each, temperature) for each in (logits, teacher))
        likely = theirs.exp()
        total: Tensor = (torch.linalg.vecdot(likely, theirs) - torch.linalg.vecdot(likely, ours)).sum() * temperature**2
        if ctx.needs_input_grad[0]:
            ctx.gradient = ours.exp_().sub_(likely)
            ctx.temperature, ctx.dtype = temperature, logits.dtype
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        gradient: Tensor = ctx.gradient
        ctx.gradient = None
        return gradient.mul_(outer * ctx.temperature).to(ctx.dtype), None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits if temperature == 1.0 else logits.float() / temperature
    return scaled.log_softmax(-1, dtype=torch.float32).clamp_(min=LEAST)


def top_divergence(logits: Tensor, top: Tensor, indices: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `divergence` for a teacher of whom the likeliest tokens are known.
    All others are one outcome together.

    logits: float [n, v]; top: the teacher's log-probabilities at that temperature, float [n, k], of
    the tokens int64 `indices` [n, k].
    Never more than the divergence over all tokens, and the same if k is v - 1.
    """
    scaled = logits.float() / temperature
    ours = scaled.gather(-1, indices) - scaled.logsumexp(-1, keepdim=True)
    theirs = top.float()
    known = (theirs.exp() * (theirs - ours)).sum()
    rest, our_rest = _rest(theirs), _rest(ours)
    return (known + (rest.exp() * (rest - our_rest)).sum()) * temperature**2


def top_of(logits: Tensor, count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities, float32 [n, count], and the likeliest tokens, int64 [n, count].
    They are those of float [n, v].
    """
    scaled = logits.float() / temperature
    top, indices = scaled.topk(count, dim=-1)
    return (top - scaled.logsumexp(-1, keepdim=True)).clamp_(min=LEAST), indices


def _rest(known: Tensor) -> Tensor:
    """Return the log-probability [n] of all tokens outside those given, float [n, k]."""
    inside = known.logsumexp(-1).clamp(max=-SMALLEST_REST)
    return (-torch.expm1(inside)).log()


def hidden_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the mean square of the difference in shares of the teacher's mean square.
    Both are float [b, s, width].
    """
    theirs = theirs.float()
    return (ours.float() - theirs).square().mean() / theirs.square().mean().clamp_min(1e-12)


def attention_divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the mean KL(teacher || student) of attention, float [b, heads, s, s] both.
    It is averaged over heads, whose numbers may differ.
    """
    student, teacher = (each.float().mean(1).clamp_min(1e-12).log() for each in (ours, theirs))
    return functional.kl_div(student, teacher, log_target=True, reduction="sum") / ours[:, 0, :, 0].numel()
