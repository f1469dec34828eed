"""The KL divergence that a change of weights causes, to second order (Fisher information).

For a small change the divergence of next-token distributions, summed over positions, is 1/2 E[<G,
dW>^2]: dW is the change of the weight and G the gradient of sum_t v_t . z_t. The z_t are the
logits, and the v_t random vectors with the covariance diag(p_t) - p_t p_t^T of the predictions p_t
(Martens 2014, arXiv:1412.1193, section 9). The gradient is summed over the tokens of a sequence
before it is squared, so what the errors at different tokens do together counts. Rounding errors of
outputs that are far apart are independent: their cross terms are 0 on average and would only add
noise. So the square is taken for each band of neighbouring outputs (a head, as a rule) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.algorithms.gptq import GptqOptions, gptq
from optkit.algorithms.grid import Grid, round_to_nearest
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.scale_search import search_scales

BAND = 64
"""Neighbouring outputs whose errors are taken together: the usual size of a head."""
JUDGED = 4
"""Every so manyth sequence is kept from GPTQ, to judge it by."""
USUAL_BITS = 4
"""What GPTQ gains over rounding to nearest hardly depends on the grid; it is measured on the one of
a layer's grids nearest to this.
"""


def fisher_probe(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return random vectors, float [..., vocabulary], with mean 0 and covariance diag(p) - p p^T.
    p is softmax(logits).

    They are sqrt(p) * s - p (sqrt(p) . s) with random signs s, which vary less than labels drawn
    from p less their mean.
    """
    likely = logits.softmax(-1)
    signs = torch.randint(0, 2, likely.shape, generator=generator, device=likely.device, dtype=torch.int8)
    signed = likely.sqrt().mul_(signs.mul_(2).sub_(1))
    return signed - likely * signed.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Seen:
    """What one linear layer saw of one sequence, in all its calls."""

    inputs: Tensor
    """float [tokens, in]."""
    gradients: Tensor
    """float [probes, tokens, out]: of the probes with respect to the layer's output."""

    def beside(self, other: Seen) -> Seen:
        """Return what two calls saw together."""
        return Seen(torch.cat((self.inputs, other.inputs)), torch.cat((self.gradients, other.gradients), dim=1))


def divergences(seen: Sequence[Seen], changes: Sequence[Tensor]) -> Tensor:
    """Return the predicted divergence in nats, summed over all tokens, float [changes].
    Each change of the weight is float [out, in].
    """
    rows = torch.stack(list(changes), dim=1)  # [out, changes, in]
    total = rows.new_zeros(rows.shape[1])
    bands = -(-len(rows) // BAND)
    for each in seen:
        gradients = torch.stack([gradient.T @ each.inputs for gradient in each.gradients], dim=2)  # [out, in, probes]
        moved = pad(rows @ gradients, (0, 0, 0, 0, 0, bands * BAND - len(rows)))  # [bands * BAND, changes, probes]
        total += moved.view(bands, BAND, *moved.shape[1:]).sum(1).square().mean(-1).sum(0)
    return total / 2


def judged_apart(seen: Sequence[Seen], weight: Tensor) -> tuple[Hessian, Sequence[Seen]]:
    """Return the Hessian of most sequences, and the others, by which is judged what it leads to."""
    hessian = Hessian(weight.shape[1], weight.device)
    for place, each in enumerate(seen, start=1):
        if place % JUDGED:
            hessian.add(each.inputs)
    return hessian, seen[JUDGED - 1 :: JUDGED]


def share_left(unseen: Sequence[Seen], plain: Tensor, solved: Tensor) -> float:
    """Return how much of the divergence of a plain change of the weight another one leaves, 1 at most."""
    before, after = divergences(unseen, [plain, solved]).tolist()
    return min(1.0, after / before) if before else 1.0


def rounding_divergences(weight: Tensor, seen: Sequence[Seen], grids: Sequence[Grid], compensated: bool) -> list[float]:
    """Return the predicted divergence of rounding a weight, float32 [out, in], to each grid.
    In nats, summed over all tokens.

    `compensated`: by GPTQ. Each grid is then rounded to nearest all the same. What GPTQ leaves of
    the divergence is measured for one of them. The sequences are others than GPTQ saw, so that few
    tokens do not make it look better than it is.
    """
    hessian, unseen = judged_apart(seen, weight)
    matrix = hessian.matrix()
    importance = matrix.diagonal() if compensated and hessian.tokens else None
    changes = [
        round_to_nearest(weight, *search_scales(weight, grid, importance), grid).dequantize() - weight for grid in grids
    ]
    left = 1.0
    if compensated and unseen and hessian.tokens >= FEW_TOKENS:
        usual = min(range(len(grids)), key=lambda place: abs(grids[place].bits - USUAL_BITS))
        solved = gptq(weight, matrix, grids[usual], GptqOptions()).weight.dequantize() - weight
        left = share_left(unseen, changes[usual], solved)
    return [left * nats for nats in divergences(seen, changes).tolist()]
