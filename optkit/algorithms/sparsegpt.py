"""SparseGPT: prune one input at a time, and compensate each weight in the inputs left.

Frantar and Alistarh 2023, arXiv:2301.00774. The mask is chosen for BLOCK inputs at once
(unstructured) or for m inputs (n:m), after all earlier errors were compensated. It goes by the
squared weight over the diagonal of the inverse Hessian. Addition: the weights that stay are then
improved together, by conjugate gradients on the layer's squared output error with the mask held
(Meng et al. 2024, arXiv:2406.07831, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.algorithms.gptq import Factored, GptqOptions, damped_inverse_factor
from optkit.algorithms.pruning import kept, kept_by_pattern
from optkit.algorithms.sparsity_pattern import Pattern
from optkit.algorithms.threads import one_thread

BLOCK = 128
"""Inputs whose mask is chosen, and whose errors are carried to the inputs after them, at once."""


def curvature(hessian: Tensor, damping: float = 0.01) -> Factored:
    """Return a Hessian, float32 [in, in], damped and factored, which layers with the same input share.
    Raises ValueError if no damping makes it positive definite.
    """
    return damped_inverse_factor(hessian, GptqOptions(damping=damping, activation_order=False))


def sparsegpt(
    weight: Tensor, curved: Factored, sparsity: float, pattern: Pattern | None = None, refinements: int = 0
) -> Tensor:
    """Return float32 [out, in] pruned; a pattern takes the place of `sparsity`. `refinements`:
    steps of conjugate gradients.

    Outputs share the choice of an unstructured mask and nothing else.
    """
    rest = weight.T.contiguous()  # [in, out]
    pruned = torch.empty_like(rest)
    for start in range(0, len(rest), BLOCK):
        part = slice(start, min(start + BLOCK, len(rest)))
        pruned[part], errors = _prune_block(rest[part], curved.factor[part, part], sparsity, pattern)
        rest[part.stop :].addmm_(curved.factor[part, part.stop :].T, errors, alpha=-1)
    if refinements:
        refine_(pruned, weight.T, curved.hessian, refinements)
    return pruned.T.contiguous()


def _prune_block(rest: Tensor, factor: Tensor, sparsity: float, pattern: Pattern | None) -> tuple[Tensor, Tensor]:
    """Return the pruned weights and the errors, float [inputs, out], of one block."""
    pruned, errors = torch.zeros_like(rest), torch.empty_like(rest)
    diagonal = factor.diagonal()
    each = diagonal.tolist()
    stays = torch.empty_like(rest, dtype=torch.bool)
    if pattern is None:
        stays.copy_(kept((rest.T / diagonal).abs(), sparsity, None, by_output=False).T)
    with one_thread():
        for index, value in enumerate(rest):
            if pattern is not None and index % pattern.of == 0:
                group = slice(index, index + pattern.of)
                stays[group] = kept_by_pattern((rest[group].T / diagonal[group]).abs(), pattern).T
            torch.where(stays[index], value, pruned[index], out=pruned[index])
            errors[index] = (value - pruned[index]) / each[index]
            rest[index + 1 :].addr_(factor[index, index + 1 :], errors[index], alpha=-1)
    return pruned, errors


def refine_(pruned: Tensor, target: Tensor, hessian: Tensor, steps: int) -> None:
    """Improve the weights that are not 0, output by output; zeros are held.
    Conjugate gradients on tr((W - P)^T H (W - P)).

    pruned, target: float [in, out]; hessian: float [in, in], positive definite. Preconditioned by
    its diagonal.
    """
    stays = pruned != 0
    inverse = stays / hessian.diagonal()[:, None]
    residual = (hessian @ (target - pruned)).mul_(stays)
    scaled = residual * inverse
    direction = scaled.clone()
    size = (residual * scaled).sum(0)
    for _ in range(steps):
        moved = (hessian @ direction).mul_(stays)
        step = _ratio(size, (direction * moved).sum(0))
        pruned.addcmul_(direction, step)
        residual.addcmul_(moved, step, value=-1)
        torch.mul(residual, inverse, out=scaled)
        left = (residual * scaled).sum(0)
        direction = scaled + direction * _ratio(left, size)
        size = left


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below, 0 if nothing is left below."""
    return torch.where(below > 0, above / below, torch.zeros_like(above))
